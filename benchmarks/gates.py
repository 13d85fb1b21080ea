"""How often gates fail an arm that equals the reference: the A/A rates of docs/gates.md, by simulation.

    python benchmarks/gates.py

Differences of pairs are normal. A verdict is tested for all arms together by Holm, as the tool does, in one pass over
arrays; first 200 comparisons of each row are held against `decide`, word by word.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from ampcompare.runs.analysis.inference.effect import ERROR_RATE, paired
from ampcompare.runs.analysis.inference.verdict import Margin, decide

Array = NDArray[np.float64]
MARGIN = 0.5  # points
SPREADS = (0.2, 0.5, 1.5)
PAIRS = (3, 5, 10)
ARMS = (1, 8)
FLOOR = 1e-9
REPLICATES = 20_000


def _holm(p: Array) -> NDArray[np.bool_]:
    """Return which of the claims of a comparison hold: p values in rows, one row for each comparison."""
    order = np.argsort(p, axis=1)
    steps = ERROR_RATE / (p.shape[1] - np.arange(p.shape[1]))
    held = np.logical_and.accumulate(np.take_along_axis(p, order, 1) < steps, axis=1)
    result = np.zeros(p.shape, bool)
    np.put_along_axis(result, order, held, 1)
    return result


def failures(differences: Array, margin: float = MARGIN) -> dict[str, NDArray[np.bool_]]:
    """Return which arms each gate fails.

    Args:
        differences: arm minus reference in points; comparisons x arms x pairs.
    """
    pairs = differences.shape[2]
    mean = differences.mean(axis=2)
    error = np.maximum(differences.std(axis=2, ddof=1), FLOOR) / np.sqrt(pairs)

    def below(bound: float) -> Array:
        return np.asarray(stdtr(pairs - 1, (bound - mean) / error))

    non_inferior = _holm(below(-margin))
    equivalent = _holm(np.maximum(below(-margin), 1 - below(margin)))
    different = _holm(2 * np.minimum(below(0.0), 1 - below(0.0)))
    better = different & (mean > 0) & ~equivalent
    return {
        "accuracy<-0.5": mean < -margin,
        "accuracy:worse": different & (mean < 0) & ~equivalent & ~non_inferior,
        "accuracy:non-inferior": ~(equivalent | better | non_inferior),
    }


def table(replicates: int) -> Iterator[str]:
    """Yield the rows of the table: percentage of comparisons in which each gate fails any arm."""
    generator = np.random.default_rng(16)
    yield "| arms | sd of a difference | pairs | accuracy<-0.5 | accuracy:worse | accuracy:non-inferior |"
    yield "|---|---|---|---|---|---|"
    for arms in ARMS:
        for spread in SPREADS:
            for pairs in PAIRS:
                failed = failures(generator.normal(0, spread, (replicates, arms, pairs)))
                rates = [f"{100 * fails.any(axis=1).mean():.1f}" for fails in failed.values()]
                yield f"| {arms} | {spread:g} | {pairs} | {' | '.join(rates)} |"


def check(comparisons: int = 200) -> None:
    """Check that the arrays give the words of `decide`."""
    generator = np.random.default_rng(17)
    for arms in ARMS:
        for spread in SPREADS:
            for pairs in PAIRS:
                drawn = generator.normal(0, spread, (comparisons, arms, pairs))
                failed = failures(drawn)
                for number, comparison in enumerate(drawn):
                    effects = [paired(list(arm), [0.0] * pairs, FLOOR) for arm in comparison]
                    words = [verdict.word for verdict in decide(effects, Margin(MARGIN, "0.5"))]
                    shown = ("equivalent", "better", "non-inferior")
                    assert [word == "worse" for word in words] == list(failed["accuracy:worse"][number])
                    unshown = [not word.startswith(shown) for word in words]
                    assert unshown == list(failed["accuracy:non-inferior"][number])


if __name__ == "__main__":
    check()
    print("\n".join(table(REPLICATES)))
