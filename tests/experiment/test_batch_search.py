"""The search for the largest number that passes."""

from __future__ import annotations

import math

import pytest

from ampcompare.experiment.find_batch import largest_passing


@pytest.mark.parametrize("start", [1, 7, 64, 1000])
@pytest.mark.parametrize("multiple", [1, 4])
def test_it_is_the_largest_within_its_precision(start: int, multiple: int) -> None:
    """For every bound: what is returned passes, and what lies a sixteenth above, or the next multiple, does not."""
    for bound in [0, 1, 2, 3, 4, 5, 9, 63, 64, 65, 100, 700, 5000]:
        tested: list[int] = []

        def passes(number: int, bound: int = bound, tested: list[int] = tested) -> bool:
            tested.append(number)
            return number <= bound

        found = largest_passing(passes, start, multiple=multiple)
        assert found % multiple == 0
        assert found <= bound
        assert bound - found < max(multiple, found / 16 + multiple)
        assert found in tested or not found
        assert len(tested) == len(set(tested))
        assert len(tested) <= 12 + 2 * math.log2(max(bound, start))


def test_exactly_where_it_is_asked_for() -> None:
    """With a precision of 0 the result is the bound itself."""
    for bound in (1, 37, 999):
        assert largest_passing(lambda number, bound=bound: number <= bound, 16, precision=0) == bound
