"""How often intervals of the mean effect over several experiments cover the truth, by way of weighting them.

    python benchmarks/pooled_effects.py [--out docs/benchmarks/pooled_effects]

An experiment is a number of pairs of normal differences, with a true effect that is normal over experiments with
standard deviation tau. The standard deviation of a pair is 1, or 1 and 4 in turn. Each experiment shows the mean
of its pairs and their variance, nothing else. The intervals are of 95 %:

    DL         weights by inverse variance, tau by DerSimonian and Laird, normal quantile
    DL HK      the same with the variance and the t quantile of Hartung and Knapp
    PM HK      likewise, tau by Paule and Mandel
    equal      equal weights: Student's t on the experiments' means, as `report DIR...` has it
    another    the interval of prediction of the report: how often it holds the true effect of one more experiment

No model is trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import click
import numpy as np
import scipy
from numpy.typing import NDArray
from results import write_results
from scipy.special import stdtrit
from tabulate import tabulate

Numbers = NDArray[np.float64]
REPETITIONS = 20_000
EXPERIMENTS = (3, 5, 10)
PAIRS: tuple[tuple[int, ...], ...] = ((3,), (5,), (10,), (3, 10))
TAUS = (0.0, 0.3, 1.0)
RATIOS = (1, 4)
HALVINGS = 50
HEADERS = ("experiments", "pairs", "sds", "tau", "DL", "DL HK", "PM HK", "equal", "another", "width DL HK", "equal")


def scatter(means: Numbers, variances: Numbers) -> Numbers:
    """Return Cochran's Q of each repetition, for the weights 1 / variances."""
    weights = 1 / variances
    center = (weights * means).sum(1, keepdims=True) / weights.sum(1, keepdims=True)
    return np.asarray((weights * (means - center) ** 2).sum(1))


def der_simonian_laird(means: Numbers, variances: Numbers) -> Numbers:
    """Return the variance between experiments by the method of moments."""
    weights = 1 / variances
    scale = weights.sum(1) - (weights**2).sum(1) / weights.sum(1)
    return np.maximum(0, (scatter(means, variances) - (means.shape[1] - 1)) / scale)


def paule_mandel(means: Numbers, variances: Numbers) -> Numbers:
    """Return the variance between experiments at which Q is its expectation, by halving."""
    freedom = means.shape[1] - 1
    low, high = np.zeros(len(means)), 10 * means.var(1, ddof=1) + variances.max(1)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = scatter(means, variances + middle[:, None]) > freedom
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(scatter(means, variances) <= freedom, 0, high)


def weighted(means: Numbers, variances: Numbers, between: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return the weighted mean, its standard error, and that of Hartung and Knapp."""
    variances = variances + between[:, None]
    weights = 1 / variances
    error = 1 / np.sqrt(weights.sum(1))
    return (
        (weights * means).sum(1) / weights.sum(1),
        error,
        error * np.sqrt(scatter(means, variances) / (means.shape[1] - 1)),
    )


def cell(draw: np.random.Generator, experiments: int, pairs: tuple[int, ...], ratio: int, tau: float) -> list[str]:
    """Return the coverage of each method in percent, and two median half widths."""
    count, sd = np.resize(pairs, experiments), np.resize((1, ratio), experiments)
    truth = draw.normal(0, tau, (REPETITIONS, experiments + 1))
    means = truth[:, :-1] + draw.normal(0, 1, (REPETITIONS, experiments)) * sd / np.sqrt(count)
    variances = sd**2 / count * draw.chisquare(count - 1, means.shape) / (count - 1)
    quantile = float(stdtrit(experiments - 1, 0.975))
    mean, error, corrected = weighted(means, variances, der_simonian_laird(means, variances))
    moved, _, moved_error = weighted(means, variances, paule_mandel(means, variances))
    plain, spread = means.mean(1), means.std(1, ddof=1)
    intervals = [
        (mean, 1.96 * error),
        (mean, quantile * corrected),
        (moved, quantile * moved_error),
        (plain, quantile * spread / np.sqrt(experiments)),
        (plain - truth[:, -1], quantile * spread * np.sqrt(1 + 1 / experiments)),
    ]
    covered = [f"{100 * np.mean(np.abs(center) <= half):.1f}" for center, half in intervals]
    return [*covered, *(f"{np.median(intervals[place][1]):.2f}" for place in (1, 3))]


def rows() -> Iterator[list[str]]:
    draw = np.random.default_rng(2026)
    for experiments, pairs, ratio, tau in itertools.product(EXPERIMENTS, PAIRS, RATIOS, TAUS):
        sds = "1" if ratio == 1 else f"1, {ratio}"
        yield [
            str(experiments),
            ", ".join(map(str, pairs)),
            sds,
            f"{tau:g}",
            *cell(draw, experiments, pairs, ratio, tau),
        ]


@click.command()
@click.option("--out", default=None, help="write OUT.md")
def main(out: str | None) -> None:
    """Simulate the mean effect over experiments."""
    text = tabulate(list(rows()), headers=HEADERS, tablefmt="pipe", disable_numparse=True)
    click.echo(text)
    if out is not None:
        facts = f"numpy {np.__version__}, scipy {scipy.__version__}; {REPETITIONS:,} repetitions, coverage in percent"
        write_results(out, "One effect over several experiments", __doc__, facts, text)


if __name__ == "__main__":
    main()
