"""How often intervals cover the difference of two arms on new images: over seeds alone, and over images and seeds.

    python -m benchmarks.rates new_images [--out docs/benchmarks/new_images]

Two arms are trained with each seed and judged on one validation set, drawn again in each repetition. A
model is right on an image with the probability 1 / (1 + exp(-x)), drawn for each arm, seed and image, with

    x = difficulty of the image + image effect of the arm + seed effect of the arm + shift of the arm

as normal numbers of standard deviation 3 around 6 (accuracy 93 to 96 %), tau, 0.1 and none, and a constant shift for a
true difference. The truth is the difference over all images that could have been drawn. "Image share" is the part of
the variance of a paired difference that images explain. The intervals are those of the report, at 95 %; median half
widths in points. 10,000 repetitions for 360 images, 4,000 for 2,000, 1,500 for 10,000.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, stdtrit

from ampcompare.results.analysis.effects.samples import (
    mean_squares_of_differences,
    standard_error_and_freedom_over_new_samples,
)
from benchmarks.rates.study import Row, Study, Table

MEAN, DIFFICULTY, SEED_EFFECT = 6.0, 3.0, 0.1
SHARES = {360: 1.0, 2_000: 0.4, 10_000: 0.15}  # of the repetitions, for each number of images
SEEDS = (3, 5, 10)
CHUNK = 4_000_000  # numbers that are drawn at once
MARGIN = 0.005
FEW = ((0.0, 0.005, 1.0), (0.0, 0.005, 0.5), (0.001, 0.006, 0.7), (0.005, 0.005, 1.0), (0.02, 0.025, 0.7))
Draws = Iterator[NDArray[np.int8]]


def _image_share(tau: float) -> float:
    """Return the part of the variance of a paired difference that images explain, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights /= weights.sum()
    difficulty = MEAN + DIFFICULTY * nodes[:, None, None]
    one, other = (
        expit(difficulty + tau * nodes[None, :, None]),
        expit(difficulty + tau * nodes[None, None, :]),
    )
    every = weights[:, None, None] * weights[None, :, None] * weights[None, None, :]
    return float((every * (one - other) ** 2).sum() / (every * (one * (1 - other) + other * (1 - one))).sum())


def _accuracy(tau: float, shift: float) -> float:
    """Return the accuracy of an arm over all images and seeds."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    spread = math.sqrt(DIFFICULTY**2 + tau**2 + SEED_EFFECT**2)
    return float((weights * expit(MEAN + shift + spread * nodes)).sum() / weights.sum())


@functools.cache
def _shift_for(tau: float, difference: float) -> float:
    """Return the shift that makes an arm differ by `difference` on all images."""
    return float(brentq(lambda shift: _accuracy(tau, shift) - _accuracy(tau, 0.0) - difference, -3, 3))


def _train(
    draw: np.random.Generator, seeds: int, images: int, repetitions: int, *, tau: float, difference: float
) -> Draws:
    """Yield differences (repetitions, seeds, images) of two arms with image effects."""

    def normal(*shape: int) -> NDArray[np.float32]:
        return draw.standard_normal(shape, dtype=np.float32)

    shifts = (_shift_for(tau, difference) if difference else 0.0, 0.0)
    for count in _chunks(repetitions, seeds * images):
        difficulty = MEAN + DIFFICULTY * normal(count, 1, images)
        right = []
        for shift in shifts:
            of_images = difficulty + np.float32(tau) * normal(count, 1, images) + np.float32(shift)
            x = of_images + np.float32(SEED_EFFECT) * normal(count, seeds, 1)
            right.append(draw.random(x.shape, dtype=np.float32) < expit(x))
        yield right[0].astype(np.int8) - right[1].astype(np.int8)


def _few(
    draw: np.random.Generator,
    seeds: int,
    images: int,
    repetitions: int,
    better: float,
    worse: float,
    often: float,
) -> Draws:
    """Yield differences on few images: a share `better` and a share `worse`, each in a share `often` of the seeds."""
    for count in _chunks(repetitions, seeds * images):
        kinds = draw.random((count, 1, images), dtype=np.float32)
        signs = (kinds < better).astype(np.int8) - ((kinds >= better) & (kinds < better + worse)).astype(
            np.int8
        )
        yield (signs * (draw.random((count, seeds, images), dtype=np.float32) < often)).astype(np.int8)


def _chunks(repetitions: int, size: int) -> Iterator[int]:
    """Yield numbers of repetitions that sum up to all of them."""
    each = max(1, CHUNK // size)
    for start in range(0, repetitions, each):
        yield min(each, repetitions - start)


def _intervals(draws: Draws, truth: float) -> dict[str, float]:
    """Return how often intervals over seeds, and over images and seeds, cover the truth, and what they conclude."""
    parts: dict[str, list[NDArray[Any]]] = {}
    for differences in draws:
        squares = mean_squares_of_differences(differences)
        seeds, images = squares.num_seeds, squares.num_samples
        mean = differences.mean((-2, -1), dtype=np.float64)
        over_seeds = np.sqrt(squares.seeds / (seeds * images)), np.full(len(mean), seeds - 1.0)
        over_both = standard_error_and_freedom_over_new_samples(squares)
        halves = {}
        for confidence in (0.95, 0.9):  # the interval of the difference, and that of a one-sided test at 5 %
            naive, crossed = (
                stdtrit(freedom, (1 + confidence) / 2) * error for error, freedom in (over_seeds, over_both)
            )
            halves[confidence] = naive, np.maximum(naive, crossed)  # as the report does: never narrower
        found = {
            "covered by seeds": np.abs(mean - truth) <= halves[0.95][0],
            "covered": np.abs(mean - truth) <= halves[0.95][1],
            "half of seeds": halves[0.95][0],
            "half": halves[0.95][1],
            "non-inferior by seeds": mean - halves[0.9][0] > -MARGIN,
            "non-inferior": mean - halves[0.9][1] > -MARGIN,
            "disagree": np.count_nonzero(differences, axis=(-2, -1)) / seeds,
        }
        for name, values in found.items():
            parts.setdefault(name, []).append(np.asarray(values, dtype=float))
    whole = {name: np.concatenate(values) for name, values in parts.items()}
    medians = {name: float(np.median(whole[name])) for name in ("half of seeds", "half")}
    return {**{name: float(values.mean()) for name, values in whole.items()}, **medians}


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _half(size: float) -> str:
    return f"±{100 * size:.2f}"


def _no_difference(cell: tuple[float, int, int], repetitions: int, draw: np.random.Generator) -> Row:
    tau, images, seeds = cell
    count = round(repetitions * SHARES[images])
    got = _intervals(_train(draw, seeds, images, count, tau=tau, difference=0.0), 0.0)
    return {
        "tau": f"{tau:g}",
        "image share %": _percent(_image_share(tau)),
        "images": f"{images:,}",
        "seeds": str(seeds),
        "over seeds: false %": _percent(1 - got["covered by seeds"]),
        "width over seeds": _half(got["half of seeds"]),
        "over both: covers %": _percent(got["covered"]),
        "width": _half(got["half"]),
    }


def _at_the_margin(cell: tuple[float, int, int], repetitions: int, draw: np.random.Generator) -> Row:
    tau, images, seeds = cell
    count = round(repetitions * SHARES[images])
    got = _intervals(_train(draw, seeds, images, count, tau=tau, difference=-MARGIN), -MARGIN)
    return {
        "tau": f"{tau:g}",
        "images": f"{images:,}",
        "seeds": str(seeds),
        "over seeds: covers %": _percent(got["covered by seeds"]),
        "over both: covers %": _percent(got["covered"]),
        "over seeds: non-inferior %": _percent(got["non-inferior by seeds"]),
        "over both: non-inferior %": _percent(got["non-inferior"]),
    }


def _on_few_images(
    cell: tuple[tuple[float, float, float], int], repetitions: int, draw: np.random.Generator
) -> Row:
    (better, worse, often), images = cell
    truth = (better - worse) * often
    got = _intervals(_few(draw, 5, images, round(repetitions * SHARES[images]), better, worse, often), truth)
    return {
        "arm; reference": f"{100 * better:g} %; {100 * worse:g} %",
        "of seeds": f"{100 * often:g} %",
        "images": f"{images:,}",
        "disagree": f"{got['disagree']:.1f}",
        "truth": f"{100 * truth:+.2f}",
        "over seeds: covers %": _percent(got["covered by seeds"]),
        "over both: covers %": _percent(got["covered"]),
        "width": _half(got["half"]),
    }


STUDY = Study(
    title="Intervals for new images",
    about=__doc__,
    tables=(
        Table(
            "no difference",
            list(itertools.product((0.0, 0.3, 1.0, 2.0), SHARES, SEEDS)),
            _no_difference,
            by=("tau", "image share %"),
            singly={"tau": ("2",)},
            about="Over seeds: how often the interval leaves out 0, a false winner or loser on new images. Over both, "
            "images and seeds: how often it covers 0.",
        ),
        Table(
            "at the margin",
            list(itertools.product((0.0, 2.0), SHARES, SEEDS)),
            _at_the_margin,
            by=("tau", "images"),
            about="The arm is worse by 0.5 points, which is the margin. At most 5 % may be called non-inferior.",
        ),
        Table(
            "few images",
            list(itertools.product(FEW, (360, 2_000))),
            _on_few_images,
            about="Differences on few images: the share of images on which only the arm or only the reference can be "
            "right, and in how many of five seeds it is.",
        ),
    ),
    replicates=10_000,
    seed=2026,
)
