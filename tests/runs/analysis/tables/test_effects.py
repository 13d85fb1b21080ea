"""The difference between two arms of a table."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from ampcompare.runs.analysis.inference.effect import p_values
from ampcompare.runs.analysis.tables.csv_table import Run
from ampcompare.runs.analysis.tables.external import combined, compare_runs, mean_and_sd
from ampcompare.runs.analysis.tables.quantities import Quantity


def _run(mean: float, sd: float | None = None, runs: int | None = 1, seed: str = "", step: float = 0.01) -> Run:
    return Run("arm", (), seed, Quantity(mean, step, sd, step), None, None, False, runs)


def test_a_known_spread_is_a_z_test() -> None:
    """Single runs of 75.79 and 75.92 at a seed sd of 0.16 give z 0.57 and p 0.57."""
    difference = compare_runs([_run(75.79)], [_run(75.92)], lambda run: run.value, 1e-9, 0.16)
    assert difference is not None
    assert difference.effect is not None
    p = p_values(difference.effect, 0.5)
    assert p.different == pytest.approx(2 * stats.norm.sf(0.13 / (0.16 * math.sqrt(2))), abs=1e-6)
    assert round(p.different, 2) == 0.57
    assert difference.uses_sd


def test_a_known_spread_counts_all_runs_behind_a_mean() -> None:
    """Means of two runs each have a smaller error than single runs."""
    difference = compare_runs([_run(75.0, runs=2)], [_run(76.0, runs=2)], lambda run: run.value, 1e-9, 0.2)
    assert difference is not None
    assert difference.effect is not None
    assert difference.effect.error == pytest.approx(0.2)


def test_nothing_to_compare() -> None:
    """An arm that was not measured has no difference, and a mean of nobody knows how many runs has no error."""
    assert compare_runs([], [_run(75)], lambda run: run.value, 1e-9) is None
    unknown = compare_runs([_run(75, 0.1, None)], [_run(75, 0.1, 5)], lambda run: run.value, 1e-9)
    assert unknown is not None
    assert unknown.effect is None
    assert combined([unknown]) is None
    assert mean_and_sd([_run(75, 0.1, None)], lambda run: run.value) == (75, 0.1)


def test_a_mean_without_a_deviation_shows_no_spread() -> None:
    """The mean of five runs that does not say how they scatter is as untestable as a single run."""
    difference = compare_runs([_run(75.0, runs=5)], [_run(76.0, runs=5)], lambda run: run.value, 1e-9)
    assert difference is not None
    assert difference.effect is not None
    assert not difference.effect.testable
