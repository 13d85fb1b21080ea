"""The uncertainty of a difference for new samples, with seeds and samples as crossed random effects.

A pair of models of one seed differs on a sample: by -1, 0 or 1 where it is right or wrong, by any number where it has a
loss. Such differences, by seed and sample, vary with the sample (some are easier for one arm), with the seed (some runs
come out better as a whole), and with both together:

    d[seed, sample] = mean + sample effect + seed effect + residual.

A t interval over seeds takes the samples as given. For samples that were not drawn, the variance of the mean adds the
sample effects: with mean squares A of samples, S of seeds and E of the residual over n seeds and m samples it is
(S + max(A - E, 0)) / (n m), by the method of moments. This is the analysis of readers and cases in diagnostic studies,
with seeds for readers, one pair of "modalities" and samples for cases.

Sources: Satterthwaite, Biometrics Bulletin 2 (1946); Clark, J. Verbal Learning and Verbal Behavior 12 (1973), for the
error of taking materials as fixed; Hillis, Statistics in Medicine 26 (2007), for the variance that is never below that
of the seeds alone and its degrees of freedom; Bonett and Price, J. Educational and Behavioral Statistics 37 (2012), for
two pseudo-samples. How well the intervals cover: `benchmarks/new_images.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampcompare.analysis.inference.effect import ERROR_RATE, min_resolvable_spread
from ampcompare.analysis.inference.sample_size import POWER

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MeanSquares", "mean_squares", "new_samples_error", "samples_needed"]

MAX_SAMPLES = 10**8
STEPS = 2000  # of the search for a number of samples: one in a hundred apart


@dataclass(frozen=True)
class MeanSquares:
    """The two-way analysis of variance of differences by seed and sample, without repetition.

    Attributes:
        samples: mean square of samples, and the other two likewise: float64 arrays of one shape, or numbers.
        num_seeds: at least 2.
        num_samples: at least 2.
    """

    samples: Any
    seeds: Any
    residual: Any
    num_seeds: int
    num_samples: int


def mean_squares(differences: NDArray[Any], seed_spread: float | None = None) -> MeanSquares:
    """Return the mean squares of differences.

    Two lower bounds reflect what a few seeds and samples cannot rule out. The spread of seeds is at least that of
    rounding: to counts (`min_resolvable_spread`), or that of the caller. And samples that all agree, right or wrong, do
    not prove that there are no others: their mean square is at least that of two that differ in every seed, one for
    each arm, which is about the rule of three.

    Args:
        differences: (..., seeds, samples), whole numbers of -1, 0 and 1, or any floats.
        seed_spread: least spread of a mean over samples; None for whole numbers.
    """
    import numpy as np

    *_, seeds, samples = differences.shape
    by_sample = differences.sum(-2, dtype=np.float64) / seeds
    by_seed = differences.sum(-1, dtype=np.float64) / samples
    mean = by_seed.mean(-1, keepdims=True)
    of_samples = seeds * ((by_sample - mean) ** 2).sum(-1)
    of_seeds = samples * ((by_seed - mean) ** 2).sum(-1)
    if seed_spread is None:
        whole = np.count_nonzero(differences, axis=(-2, -1)) - seeds * samples * mean[..., 0] ** 2
        least, seed_spread = 2 * seeds / samples, min_resolvable_spread(samples)
    else:
        whole = ((differences - mean[..., None]) ** 2).sum((-2, -1))
        least = 0.0
    residual = np.maximum(whole - of_samples - of_seeds, 0) / ((seeds - 1) * (samples - 1))
    return MeanSquares(
        samples=np.maximum(of_samples / (samples - 1), least),
        seeds=np.maximum(of_seeds / (seeds - 1), samples * seed_spread**2),
        residual=residual,
        num_seeds=seeds,
        num_samples=samples,
    )


def new_samples_error(squares: MeanSquares) -> tuple[Any, Any]:
    """Return the standard error of the mean difference over new samples and new seeds, and its degrees of freedom."""
    import numpy as np

    variance = squares.seeds + np.maximum(squares.samples - squares.residual, 0)
    freedom = (squares.num_seeds - 1) * (variance / squares.seeds) ** 2
    return np.sqrt(variance / (squares.num_seeds * squares.num_samples)), freedom


def samples_needed(squares: MeanSquares, margin: float, alpha: float = ERROR_RATE, power: float = POWER) -> int | None:
    """Return about how many samples would show equivalence on new ones, if the arms do not differ.

    Args:
        squares: of one comparison; another number of samples keeps its components of variance and its seeds.
        margin: of the differences.
        alpha: of each of the two one-sided tests.
        power: with which both succeed.

    Returns:
        None if no number would do: the spread over so few seeds alone is too large.
    """
    import numpy as np
    from scipy.special import stdtrit

    seeds = squares.num_seeds
    sample_variance = max(squares.samples - squares.residual, 0) / seeds
    seed_variance = max(squares.seeds - squares.residual, 0) / squares.num_samples
    residual = min(squares.residual, squares.seeds)
    counts = np.unique(np.geomspace(2, MAX_SAMPLES, STEPS).round())
    over_seeds = (seed_variance + residual / counts) / seeds
    variance = over_seeds + sample_variance / counts
    freedom = (seeds - 1) * (variance / over_seeds) ** 2
    needed = (stdtrit(freedom, 1 - alpha) + stdtrit(freedom, 1 - (1 - power) / 2)) * np.sqrt(variance)
    enough = np.flatnonzero(needed <= margin)
    return int(counts[enough[0]]) if len(enough) else None
