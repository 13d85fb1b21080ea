"""Combinations of several parameters in which any two values of different parameters meet, in place of all of them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def pairs_of(row: Sequence[int]) -> Iterable[tuple[int, int, int, int]]:
    """Yield each two values of a combination with the numbers of their parameters."""
    for one, other in itertools.combinations(range(len(row)), 2):
        yield one, row[one], other, row[other]


def rows_of(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return few combinations of so many values each, the same at every call: the next is that with most new pairs."""
    rows = list(itertools.product(*map(range, sizes)))
    pairs = {row: set(pairs_of(row)) for row in rows}
    missing = set().union(*pairs.values())
    found: list[tuple[int, ...]] = []
    while missing:
        found.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[found[-1]]
    return sorted(found)


def covering(parameters: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Return the mark that runs a test with few combinations of parameters, in which any two values meet.

    Faults that need three values at once are rare: what each does alone and with each other one is seen.

    Args:
        parameters: values by name, as `parametrize` takes them: "a,b" has tuples, and any may be a `pytest.param`.
    """
    rows = rows_of([len(values) for values in parameters.values()])
    sets = [
        [
            value if isinstance(value, ParameterSet) else pytest.param(*(value if "," in names else (value,)))
            for value in values
        ]
        for names, values in parameters.items()
    ]
    return pytest.mark.parametrize(
        ",".join(parameters),
        [_joined([each[at] for each, at in zip(sets, row, strict=True)]) for row in rows],
    )


def _joined(sets: Sequence[ParameterSet]) -> ParameterSet:
    """Return the values of several parameters as one set, with the marks and the names of all."""
    values = [value for one in sets for value in one.values]
    names = [str(one.id or "-".join(map(_name, one.values))) for one in sets]
    return pytest.param(*values, marks=[mark for one in sets for mark in one.marks], id="-".join(names))


def _name(value: object) -> str:
    return str(getattr(value, "__name__", value)).removeprefix("torch.")
