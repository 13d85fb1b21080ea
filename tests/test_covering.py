"""Covering combinations: every pair is there, and they are few."""

import itertools

import pytest

from tests.covering import covering, pairs_of, rows_of


@pytest.mark.parametrize(
    ("sizes", "at_most"), [((17, 3, 3), 51), ((5, 2, 2), 10), ((2, 2, 2, 2, 2), 8), ((4, 3, 3, 2), 14), ((7,), 0)]
)
def test_every_two_values_meet(sizes: tuple[int, ...], at_most: int) -> None:
    rows = rows_of(sizes)
    met = {pair for row in rows for pair in pairs_of(row)}
    assert met == {pair for row in itertools.product(*map(range, sizes)) for pair in pairs_of(row)}
    assert len(rows) <= at_most


def test_names_and_marks_of_values_are_kept() -> None:
    """A value that is marked or named keeps both, as under `parametrize`, and a name of two has tuples."""
    mark = covering({"one": [1, pytest.param(2, id="two", marks=pytest.mark.slow)], "two,three": [("x", len)]}).mark
    assert mark.args[0] == "one,two,three"
    first, second = mark.args[1]
    assert (first.values, first.id, second.values, second.id) == ((1, "x", len), "1-x-len", (2, "x", len), "two-x-len")
    assert [one.name for one in second.marks] == ["slow"]
