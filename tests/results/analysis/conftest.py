"""A quick way to verdicts, for simulations."""

import math
from collections.abc import Sequence
from functools import cache

import pytest

from ampcompare.results.analysis.inference.effect import margin_test_interval, p_values, t_interval


@pytest.fixture
def quick_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out how many seeds an open verdict lacks, which a simulation does not read, compute once what equal counts
    have in common, and round deviations as floats do: `statistics` has fractions, for half of the time of a verdict.
    """

    def variance(values: Sequence[float]) -> float:
        if min(values) == max(values):
            return 0.0
        mean = math.fsum(values) / len(values)
        return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)

    verdict = "ampcompare.results.analysis.inference.verdict"
    monkeypatch.setattr(f"{verdict}.total_pairs_to_settle", lambda *_, **__: None)
    for test in (p_values, t_interval, margin_test_interval):
        monkeypatch.setattr(f"{verdict}.{test.__name__}", cache(test))
    monkeypatch.setattr("statistics.variance", variance)
    monkeypatch.setattr("statistics.stdev", lambda values: math.sqrt(variance(values)))
