"""How often intervals of the mean effect over several experiments cover the truth, by way of weighting them.

    python -m benchmarks.rates pooled_effects [--out docs/benchmarks/pooled_effects]

An experiment is 3, 5 or 10 pairs of normal differences, or 3 and 10 in turn, with a true effect that is normal over
experiments with standard deviation tau. The standard deviation of a pair is 1, or 1 and 4 in turn. Each experiment
shows the mean of its pairs and their variance, nothing else. Coverage in percent of intervals of 95 %:

    DL         weights by inverse variance, tau by DerSimonian and Laird, normal quantile
    DL HK      the same with the variance and the t quantile of Hartung and Knapp
    PM HK      likewise, tau by Paule and Mandel
    equal      equal weights: Student's t on the experiments' means, as `report DIR...` has it
    another    the interval of prediction of the report: how often it holds the true effect of one more experiment
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from benchmarks.rates.study import Row, Study, Table

__all__ = ["STUDY"]

Numbers = NDArray[np.float64]
PAIRS: tuple[tuple[int, ...], ...] = ((3,), (5,), (10,), (3, 10))
HALVINGS = 50


def _scatter(means: Numbers, variances: Numbers) -> Numbers:
    """Return Cochran's Q of each repetition, for the weights 1 / variances."""
    weights = 1 / variances
    center = (weights * means).sum(1, keepdims=True) / weights.sum(1, keepdims=True)
    return np.asarray((weights * (means - center) ** 2).sum(1))


def _der_simonian_laird(means: Numbers, variances: Numbers) -> Numbers:
    """Return the variance between experiments by the method of moments."""
    weights = 1 / variances
    scale = weights.sum(1) - (weights**2).sum(1) / weights.sum(1)
    return np.asarray(np.maximum(0, (_scatter(means, variances) - (means.shape[1] - 1)) / scale))


def _paule_mandel(means: Numbers, variances: Numbers) -> Numbers:
    """Return the variance between experiments at which Q is its expectation, by halving."""
    freedom = means.shape[1] - 1
    low, high = np.zeros(len(means)), 10 * means.var(1, ddof=1) + variances.max(1)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = _scatter(means, variances + middle[:, None]) > freedom
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(_scatter(means, variances) <= freedom, 0, high)


def _weighted(means: Numbers, variances: Numbers, between: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return the weighted mean, its standard error, and that of Hartung and Knapp."""
    variances = variances + between[:, None]
    weights = 1 / variances
    error = 1 / np.sqrt(weights.sum(1))
    corrected = error * np.sqrt(_scatter(means, variances) / (means.shape[1] - 1))
    return (weights * means).sum(1) / weights.sum(1), error, corrected


def _row(cell: tuple[int, tuple[int, ...], int, float], replicates: int, draw: np.random.Generator) -> Row:
    """Return the coverage of each method in percent, and two median half widths."""
    experiments, pairs, ratio, tau = cell
    count, sd = np.resize(pairs, experiments), np.resize((1, ratio), experiments)
    truth = draw.normal(0, tau, (replicates, experiments + 1))
    means = truth[:, :-1] + draw.normal(0, 1, (replicates, experiments)) * sd / np.sqrt(count)
    variances = sd**2 / count * draw.chisquare(count - 1, means.shape) / (count - 1)
    quantile = float(stdtrit(experiments - 1, 0.975))
    mean, error, corrected = _weighted(means, variances, _der_simonian_laird(means, variances))
    moved, _, moved_error = _weighted(means, variances, _paule_mandel(means, variances))
    plain, spread = means.mean(1), means.std(1, ddof=1)
    intervals = {
        "DL": (mean, 1.96 * error),
        "DL HK": (mean, quantile * corrected),
        "PM HK": (moved, quantile * moved_error),
        "equal": (plain, quantile * spread / np.sqrt(experiments)),
        "another": (plain - truth[:, -1], quantile * spread * np.sqrt(1 + 1 / experiments)),
    }
    return {
        "experiments": str(experiments),
        "pairs": ", ".join(map(str, pairs)),
        "sds": "1" if ratio == 1 else f"1, {ratio}",
        "tau": f"{tau:g}",
        **{name: f"{100 * np.mean(np.abs(center) <= half):.1f}" for name, (center, half) in intervals.items()},
        **{f"width {name}": f"{np.median(intervals[name][1]):.2f}" for name in ("DL HK", "equal")},
    }


STUDY = Study(
    title="One effect over several experiments",
    about=__doc__,
    tables=(
        Table(
            "coverage",
            list(itertools.product((3, 5, 10), PAIRS, (1, 4), (0.0, 0.3, 1.0))),
            _row,
            by=("experiments",),
            only_json=("pairs", "sds", "tau"),
        ),
    ),
    replicates=20_000,
    seed=2026,
)
