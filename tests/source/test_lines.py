"""Positions of `ast` in texts with every newline and with characters of several bytes."""

from __future__ import annotations

import ast

import pytest

from ampcompare.source.module import Text


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("word", ["plain", "höher", "日本語", "😀"])
def test_positions_of_nodes(newline: str, word: str) -> None:
    """A node lies where `ast` says that it does, in bytes, on every line."""
    text = newline.join([f"first = '{word}'; second = 1", "", f"third = ['{word}', fourth]", ""])
    lines = Text(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            start = lines.offset(node.lineno, node.col_offset)
            assert text[start : start + len(node.id)] == node.id


def test_lines_and_their_starts() -> None:
    """Each line has its end; behind the last line there is nothing."""
    lines = Text("a\r\nb\n\rc")
    assert [lines.line_text(number) for number in range(1, 6)] == ["a\r\n", "b\n", "\r", "c", ""]
    assert [lines.line_start(number) for number in (1, 2, 4, 9)] == [0, 3, 6, 7]
