"""One effect over several experiments: their mean, how far they differ, and what another one would show.

Experiments count alike (a random-effects model with equal weights). Weights by the inverse of each experiment's
variance, as DerSimonian-Laird and Paule-Mandel use them, suppose that the variances are known. Here each comes from
three to ten pairs: the experiment that happens to scatter least gets nearly all weight. In simulations of 3 to 10
experiments of 3 to 10 pairs, intervals of 95 % by DerSimonian-Laird with the normal quantile cover 78 to 94 %, by
either method with Hartung and Knapp's correction 87 to 95 %. With equal weights the correction is Student's t on the
experiments' own differences, which covers 95 to 98 % (benchmarks/pooled_effects.py).

Sources: Hartung and Knapp 2001 (variance and t quantile); Hedges and Olkin 1985 (the variance between experiments as
that of the differences less the mean of their own); Higgins, Thompson and Spiegelhalter 2009 (prediction).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ampcompare.analysis.inference.effect import ERROR_RATE, MIN_PAIRS, Effect, paired

__all__ = ["Pooled", "pool"]


@dataclass(frozen=True)
class Pooled:
    """The mean effect over experiments.

    Attributes:
        effect: whose pairs are the experiments.
        prediction: interval that the measured effect of another such experiment lies in at 95 %; None for fewer than
            three experiments.
        tau: standard deviation between experiments beyond what their own errors explain.
        i_squared: share of the variance of their effects that is between them.
    """

    effect: Effect
    prediction: tuple[float, float] | None
    tau: float
    i_squared: float


def pool(effects: Sequence[Effect], floor: float) -> Pooled:
    """Pool the effects of at least one experiment.

    Args:
        floor: least standard deviation between effects, above 0, from the resolution of what was measured.
    """
    means = [effect.mean for effect in effects]
    whole = paired(means, [0.0] * len(means), floor)
    within = statistics.fmean(effect.error**2 for effect in effects)
    between = max(0.0, statistics.variance(means) - within) if len(means) > 1 else 0.0
    return Pooled(whole, _prediction(whole), math.sqrt(between), between / (between + within))


def _prediction(whole: Effect) -> tuple[float, float] | None:
    """Return the interval of one more effect of the same spread, by Student's t."""
    if whole.pairs < MIN_PAIRS:
        return None
    from scipy.special import stdtrit

    half = float(stdtrit(whole.freedom, 1 - ERROR_RATE / 2)) * whole.spread * math.sqrt(1 + 1 / whole.pairs)
    return whole.mean - half, whole.mean + half
