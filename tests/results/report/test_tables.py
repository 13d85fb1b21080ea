"""Tables that fit a terminal: folded columns, wrapped text, and whole lines elsewhere."""

import io

import pytest

from ampcompare.results.report.tables import grid_table, listing_table, room

ROWS = [["fp32", "1.25", "a" * 12], ["apex:O2", "-", "b"]]
HEADERS = ["arm", "top-1 %", "engine"]


def test_a_wide_table_is_folded() -> None:
    """Columns that do not fit go on below, each part with the first column; every cell is there once more."""
    whole = grid_table(ROWS, HEADERS)
    assert len(whole.splitlines()) == 4
    assert grid_table(ROWS, HEADERS, 80) == whole
    first, second = grid_table(ROWS, HEADERS, 24).split("\n\n")
    assert first.splitlines()[0].split() == ["arm", "top-1", "%"]
    assert second.splitlines()[0].split() == ["arm", "engine"]
    assert [line.split()[0] for line in second.splitlines()[2:]] == ["fp32", "apex:O2"]
    assert max(map(len, [*first.splitlines(), *second.splitlines()])) <= 24


def test_a_listing_without_room_for_its_text_has_a_paragraph_for_each_row() -> None:
    """Where the columns alone fill the terminal, their heads stand before the values that there are."""
    rows = [["runs/one", "2026-01-02 03:04", "-", "script, native:bf16", "0-2", " ".join(["word"] * 20)]]
    heads = ["folder", "changed", "tag", "arms", "seeds", "headline"]
    for width in (60, 80):
        first, *rest = listing_table(rows * 2, heads, width).splitlines()
        assert first == "runs/one"
        assert rest.count("runs/one") == 1
        assert max(map(len, rest)) <= width
        said = " ".join(" ".join(rest[: rest.index("runs/one")]).split())
        assert said == f"changed 2026-01-02 03:04; arms script, native:bf16; seeds 0-2 {rows[0][-1]}"


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe or a file gets whole lines, whatever COLUMNS says."""
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert room() is None
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert room() == 72
