"""Numbers as people read them, and suggestions for misspelled names."""

import sys
from types import SimpleNamespace

import pytest

from ampcompare.base.errors import close_matches, suggestion_text
from ampcompare.base.formatting import fold_line_to_terminal_width, format_ordinal


@pytest.mark.parametrize(("is_terminal", "lines"), [(True, 3), (False, 1)])
def test_lines_are_folded_to_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, lines: int
) -> None:
    """Between words, further to the right; elsewhere programs search whole lines."""
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: is_terminal, fileno=lambda: -1))
    monkeypatch.setenv("COLUMNS", "20")
    folded = fold_line_to_terminal_width("  a long line of many words that go on")
    assert len(folded.splitlines()) == lines
    assert all(len(line) <= 20 for line in folded.splitlines()) == is_terminal
    assert folded.split() == ["a", "long", "line", "of", "many", "words", "that", "go", "on"]


def test_the_closest_names_are_suggested() -> None:
    assert suggestion_text("convnte", ["mlp", "convnet"]) == "did you mean 'convnet'?"
    assert (
        suggestion_text("resnet19", ["resnet18", "resnet101"], count=2)
        == "did you mean 'resnet18' or 'resnet101'?"
    )
    assert close_matches("zzz", ["mlp", "convnet"]) == []


def test_without_a_match_a_few_names_are_listed() -> None:
    assert suggestion_text("zzz", ["a", "b"]) == "known are a, b"
    assert suggestion_text("zzz", [f"name{i}" for i in range(20)]).endswith("name11 and 8 more")
    assert suggestion_text("zzz", []) == "known are none"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "1st"),
        (2, "2nd"),
        (3, "3rd"),
        (6, "6th"),
        (11, "11th"),
        (12, "12th"),
        (22, "22nd"),
        (113, "113th"),
    ],
)
def test_an_ordinal(number: int, text: str) -> None:
    assert format_ordinal(number) == text
