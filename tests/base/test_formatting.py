"""Numbers as people read them."""

import sys
from types import SimpleNamespace

import pytest

from ampcompare.base.formatting import fold_to_terminal


@pytest.mark.parametrize(("is_terminal", "lines"), [(True, 3), (False, 1)])
def test_lines_are_folded_to_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, lines: int) -> None:
    """Between words, further to the right; elsewhere programs search whole lines."""
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: is_terminal, fileno=lambda: -1))
    monkeypatch.setenv("COLUMNS", "20")
    folded = fold_to_terminal("  a long line of many words that go on")
    assert len(folded.splitlines()) == lines
    assert all(len(line) <= 20 for line in folded.splitlines()) == is_terminal
    assert folded.split() == ["a", "long", "line", "of", "many", "words", "that", "go", "on"]
