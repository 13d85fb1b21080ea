"""Covering combinations: every pair is there, and they are few."""

import itertools

import pytest

from tests.covering import pairs_of, rows_of


@pytest.mark.parametrize(
    ("sizes", "at_most"), [((17, 3, 3), 51), ((5, 2, 2), 10), ((2, 2, 2, 2, 2), 8), ((4, 3, 3, 2), 14), ((7,), 0)]
)
def test_every_two_values_meet(sizes: tuple[int, ...], at_most: int) -> None:
    rows = rows_of(sizes)
    met = {pair for row in rows for pair in pairs_of(row)}
    assert met == {pair for row in itertools.product(*map(range, sizes)) for pair in pairs_of(row)}
    assert len(rows) <= at_most
