"""How often gates fail an arm that equals the reference: the A/A rates of docs/gates.md.

    python -m benchmarks.rates gates

Differences of pairs are normal, the margin is 0.5 points. A verdict is tested for all arms together by Holm, as the
tool does. A cell is the share of comparisons in which a gate fails any arm.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from benchmarks.rates.arrays import Floats, claims
from benchmarks.rates.study import Row, Study, Table

MARGIN = 0.5  # points
FLOOR = 1e-9


def failures(differences: Floats, margin: float = MARGIN) -> dict[str, NDArray[np.bool_]]:
    """Return which arms each gate fails.

    Args:
        differences: arm minus reference in points; comparisons x arms x pairs.
    """
    shown = claims(differences, margin, FLOOR)
    better = shown.different & (shown.mean > 0) & ~shown.equivalent
    return {
        "accuracy<-0.5": shown.mean < -margin,
        "accuracy:worse": shown.different & (shown.mean < 0) & ~shown.equivalent & ~shown.non_inferior,
        "accuracy:non-inferior": ~(shown.equivalent | better | shown.non_inferior),
    }


def _row(cell: tuple[int, float, int], replicates: int, generator: np.random.Generator) -> Row:
    arms, spread, pairs = cell
    failed = failures(generator.normal(0, spread, (replicates, arms, pairs)))
    rates = {gate: f"{100 * fails.any(axis=1).mean():.1f}" for gate, fails in failed.items()}
    return {"arms": str(arms), "sd of a difference": f"{spread:g}", "pairs": str(pairs), **rates}


CELLS = list(itertools.product((1, 8), (0.2, 0.5, 1.5), (3, 5, 10)))
STUDY = Study(
    title="Gates that fail equal arms",
    about=__doc__,
    tables=(Table("gates", CELLS, _row),),
    replicates=20_000,
    seed=16,
)
