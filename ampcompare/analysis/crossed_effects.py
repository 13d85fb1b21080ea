"""How sure a difference over seeds and images is for new images: both as crossed random effects.

A pair of models of one seed differs on an image by -1, 0 or 1: right only in the reference, in both or neither, only in
the arm. Such differences, by seed and image, vary with the image (some are easier for one arm), with the seed (some
runs come out better as a whole), and with both together:

    d[seed, image] = mean + image effect + seed effect + residual.

A t interval over seeds takes the images as given. For images that were not drawn, the variance of the mean adds the
image effects: with mean squares A of images, S of seeds and E of the residual over n seeds and m images it is
(S + max(A - E, 0)) / (n m), by the method of moments. This is the analysis of readers and cases in diagnostic studies,
with seeds for readers, one pair of "modalities" and images for cases.

Sources: Satterthwaite, Biometrics Bulletin 2 (1946); Clark, J. Verbal Learning and Verbal Behavior 12 (1973), for the
error of taking materials as fixed; Hillis, Statistics in Medicine 26 (2007), for the variance that is never below that
of the seeds alone and its degrees of freedom; Bonett and Price, J. Educational and Behavioral Statistics 37 (2012), for
two pseudo-images. How well the intervals cover: `benchmarks/new_images.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampcompare.analysis.sample_size import POWER
from ampcompare.analysis.statistics import ERROR_RATE, min_resolvable_spread

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MeanSquares", "images_needed", "mean_squares", "new_images_error"]

MAX_IMAGES = 10**8
STEPS = 2000  # of the search for a number of images: one in a hundred apart


@dataclass(frozen=True)
class MeanSquares:
    """The two-way analysis of variance of differences by seed and image, without repetition.

    Attributes:
        images: mean square of images, and the other two likewise: float64 arrays of one shape, or numbers.
        num_seeds: at least 2.
        num_images: at least 2.
    """

    images: Any
    seeds: Any
    residual: Any
    num_seeds: int
    num_images: int


def mean_squares(differences: NDArray[Any]) -> MeanSquares:
    """Return the mean squares of differences.

    Two floors say what a few seeds and images cannot deny. The spread of seeds is at least that of rounding to counts
    (`min_resolvable_spread`). And images that all agree are no proof that there are no others: their mean square is at
    least that of two that differ in every seed, one for each arm, which is about the rule of three.

    Args:
        differences: (..., seeds, images), whole numbers of -1, 0 and 1.
    """
    import numpy as np

    *_, seeds, images = differences.shape
    by_image = differences.sum(-2, dtype=np.float64) / seeds
    by_seed = differences.sum(-1, dtype=np.float64) / images
    mean = by_seed.mean(-1, keepdims=True)
    of_images = seeds * ((by_image - mean) ** 2).sum(-1)
    of_seeds = images * ((by_seed - mean) ** 2).sum(-1)
    whole = np.count_nonzero(differences, axis=(-2, -1)) - seeds * images * mean[..., 0] ** 2
    residual = np.maximum(whole - of_images - of_seeds, 0) / ((seeds - 1) * (images - 1))
    return MeanSquares(
        images=np.maximum(of_images / (images - 1), 2 * seeds / images),
        seeds=np.maximum(of_seeds / (seeds - 1), images * min_resolvable_spread(images) ** 2),
        residual=residual,
        num_seeds=seeds,
        num_images=images,
    )


def new_images_error(squares: MeanSquares) -> tuple[Any, Any]:
    """Return the standard error of the mean difference over new images and new seeds, and its degrees of freedom."""
    import numpy as np

    variance = squares.seeds + np.maximum(squares.images - squares.residual, 0)
    freedom = (squares.num_seeds - 1) * (variance / squares.seeds) ** 2
    return np.sqrt(variance / (squares.num_seeds * squares.num_images)), freedom


def images_needed(squares: MeanSquares, margin: float, alpha: float = ERROR_RATE, power: float = POWER) -> int | None:
    """Return about how many images would show equivalence on new ones, if the arms do not differ.

    Args:
        squares: of one comparison; another number of images keeps its components of variance and its seeds.
        margin: as a share of images.
        alpha: of each of the two one-sided tests.
        power: with which both succeed.

    Returns:
        None if no number would do: the spread over so few seeds alone is too large.
    """
    import numpy as np
    from scipy.special import stdtrit

    seeds = squares.num_seeds
    image_variance = max(squares.images - squares.residual, 0) / seeds
    seed_variance = max(squares.seeds - squares.residual, 0) / squares.num_images
    residual = min(squares.residual, squares.seeds)
    counts = np.unique(np.geomspace(2, MAX_IMAGES, STEPS).round())
    over_seeds = (seed_variance + residual / counts) / seeds
    variance = over_seeds + image_variance / counts
    freedom = (seeds - 1) * (variance / over_seeds) ** 2
    needed = (stdtrit(freedom, 1 - alpha) + stdtrit(freedom, 1 - (1 - power) / 2)) * np.sqrt(variance)
    enough = np.flatnonzero(needed <= margin)
    return int(counts[enough[0]]) if len(enough) else None
