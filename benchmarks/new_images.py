"""How often intervals cover the difference of two arms on new images: over seeds alone, and over images and seeds.

    python benchmarks/new_images.py [--out docs/benchmarks/new_images]

Two arms are trained with each seed and judged on one validation set, drawn again in each repetition. A
model is right on an image with the probability 1 / (1 + exp(-x)), drawn for each arm, seed and image, with

    x = difficulty of the image + image effect of the arm + seed effect of the arm + shift of the arm

as normal numbers of standard deviation 3 around 6 (accuracy 93 to 96 %), tau, 0.1 and none, and a constant shift for a
true difference. The truth is the difference over all images that could have been drawn. "Image share" is the part of
the variance of a paired difference that images explain. In the last table a difference exists on few images only, each
in favor of one arm. The intervals are those of the report, at 95 %; no model is trained.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import click
import numpy as np
import scipy
from numpy.typing import NDArray
from results import write_results
from scipy.optimize import brentq
from scipy.special import expit, stdtrit
from tabulate import tabulate

from ampcompare.runs.analysis.verdicts.samples import mean_squares, new_samples_error

MEAN, DIFFICULTY, SEED_EFFECT = 6.0, 3.0, 0.1
TAUS = (0.0, 0.3, 1.0, 2.0)
IMAGES = {360: 10_000, 2_000: 4_000, 10_000: 1_500}  # repetitions for each number of images
SEEDS = (3, 5, 10)
CHUNK = 4_000_000  # numbers that are drawn at once
MARGIN = 0.005
FEW = ((0.0, 0.005, 1.0), (0.0, 0.005, 0.5), (0.001, 0.006, 0.7), (0.005, 0.005, 1.0), (0.02, 0.025, 0.7))
Draws = Iterator[NDArray[np.int8]]


def image_share(tau: float) -> float:
    """Return the part of the variance of a paired difference that images explain, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights /= weights.sum()
    difficulty = MEAN + DIFFICULTY * nodes[:, None, None]
    one, other = expit(difficulty + tau * nodes[None, :, None]), expit(difficulty + tau * nodes[None, None, :])
    every = weights[:, None, None] * weights[None, :, None] * weights[None, None, :]
    return float((every * (one - other) ** 2).sum() / (every * (one * (1 - other) + other * (1 - one))).sum())


def accuracy(tau: float, shift: float) -> float:
    """Return the accuracy of an arm over all images and seeds."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    spread = math.sqrt(DIFFICULTY**2 + tau**2 + SEED_EFFECT**2)
    return float((weights * expit(MEAN + shift + spread * nodes)).sum() / weights.sum())


@functools.cache
def shift_for(tau: float, difference: float) -> float:
    """Return the shift that makes an arm differ by `difference` on all images."""
    return float(brentq(lambda shift: accuracy(tau, shift) - accuracy(tau, 0.0) - difference, -3, 3))


def trained(
    draw: np.random.Generator, seeds: int, images: int, repetitions: int, *, tau: float, difference: float
) -> Draws:
    """Yield differences (repetitions, seeds, images) of two arms with image effects."""

    def normal(*shape: int) -> NDArray[np.float32]:
        return draw.standard_normal(shape, dtype=np.float32)

    shifts = (shift_for(tau, difference) if difference else 0.0, 0.0)
    for count in chunks(repetitions, seeds * images):
        difficulty = MEAN + DIFFICULTY * normal(count, 1, images)
        right = []
        for shift in shifts:
            of_images = difficulty + np.float32(tau) * normal(count, 1, images) + np.float32(shift)
            x = of_images + np.float32(SEED_EFFECT) * normal(count, seeds, 1)
            right.append(draw.random(x.shape, dtype=np.float32) < expit(x))
        yield right[0].astype(np.int8) - right[1].astype(np.int8)


def few(
    draw: np.random.Generator, seeds: int, images: int, repetitions: int, better: float, worse: float, often: float
) -> Draws:
    """Yield differences on few images: a share `better` and a share `worse`, each in a share `often` of the seeds."""
    for count in chunks(repetitions, seeds * images):
        kinds = draw.random((count, 1, images), dtype=np.float32)
        signs = (kinds < better).astype(np.int8) - ((kinds >= better) & (kinds < better + worse)).astype(np.int8)
        yield (signs * (draw.random((count, seeds, images), dtype=np.float32) < often)).astype(np.int8)


def chunks(repetitions: int, size: int) -> Iterator[int]:
    """Yield numbers of repetitions that sum up to all of them."""
    each = max(1, CHUNK // size)
    for start in range(0, repetitions, each):
        yield min(each, repetitions - start)


def intervals(draws: Draws, truth: float) -> dict[str, float]:
    """Return how often intervals over seeds, and over images and seeds, cover the truth, and what they conclude."""
    parts: dict[str, list[NDArray[Any]]] = {}
    for differences in draws:
        squares = mean_squares(differences)
        seeds, images = squares.num_seeds, squares.num_samples
        mean = differences.mean((-2, -1), dtype=np.float64)
        over_seeds = np.sqrt(squares.seeds / (seeds * images)), np.full(len(mean), seeds - 1.0)
        over_both = new_samples_error(squares)
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


def table(headers: str, rows: Iterator[list[str]]) -> str:
    text: str = tabulate(list(rows), headers=headers.split(", "), tablefmt="github", disable_numparse=True)
    return text


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def half(size: float) -> str:
    return f"±{100 * size:.2f}"


def no_difference(draw: np.random.Generator) -> Iterator[list[str]]:
    """Yield a row for each size of image effects, number of images and of seeds, where the arms do not differ."""
    for tau in TAUS:
        for images, repetitions in IMAGES.items():
            for seeds in SEEDS:
                got = intervals(trained(draw, seeds, images, repetitions, tau=tau, difference=0.0), 0.0)
                yield [
                    f"{tau:g}",
                    percent(image_share(tau)),
                    f"{images:,}",
                    str(seeds),
                    percent(1 - got["covered by seeds"]),
                    half(got["half of seeds"]),
                    percent(got["covered"]),
                    half(got["half"]),
                ]


def at_the_margin(draw: np.random.Generator) -> Iterator[list[str]]:
    """Yield a row for each number of images and of seeds, where the arm is worse by exactly the margin."""
    for tau in (0.0, 2.0):
        for images, repetitions in IMAGES.items():
            for seeds in SEEDS:
                got = intervals(trained(draw, seeds, images, repetitions, tau=tau, difference=-MARGIN), -MARGIN)
                names = ("covered by seeds", "covered", "non-inferior by seeds", "non-inferior")
                yield [f"{tau:g}", f"{images:,}", str(seeds), *(percent(got[name]) for name in names)]


def on_few_images(draw: np.random.Generator) -> Iterator[list[str]]:
    """Yield a row for each kind of rare difference."""
    for better, worse, often in FEW:
        for images in (360, 2_000):
            truth = (better - worse) * often
            got = intervals(few(draw, 5, images, IMAGES[images], better, worse, often), truth)
            yield [
                f"{100 * better:g} %; {100 * worse:g} %",
                f"{100 * often:g} %",
                f"{images:,}",
                f"{got['disagree']:.1f}",
                f"{100 * truth:+.2f}",
                percent(got["covered by seeds"]),
                percent(got["covered"]),
                half(got["half"]),
            ]


@click.command()
@click.option("--out", default=None, help="write OUT.md")
def main(out: str | None) -> None:
    """Simulate intervals for new images."""
    draw = np.random.default_rng(2026)
    tables = {
        "No difference. Over seeds: how often the interval leaves out 0, a false winner or loser on new images. Over "
        "both, images and seeds: how often the interval covers 0. Median half widths in points.": (
            "tau, image share %, images, seeds, over seeds: false %, width, over both: covers %, width",
            no_difference(draw),
        ),
        "A true difference of -0.5 points, which is the margin. At most 5 % may be called non-inferior.": (
            "tau, images, seeds, over seeds: covers %, over both: covers %, "
            "over seeds: non-inferior %, over both: non-inferior %",
            at_the_margin(draw),
        ),
        "Differences on few images: the share of images on which only the arm or only the reference can be right, and "
        "in how many of five seeds it is.": (
            "arm; reference, of seeds, images, disagree, truth, over seeds: covers %, over both: covers %, width",
            on_few_images(draw),
        ),
    }
    texts = []
    for about, (headers, rows) in tables.items():
        texts.append(f"{about}\n\n{table(headers, rows)}")
        click.echo(f"{texts[-1]}\n")
    counts = ", ".join(f"{repetitions:,} for {images:,} images" for images, repetitions in IMAGES.items())
    if out is not None:
        facts = f"numpy {np.__version__}, scipy {scipy.__version__}; repetitions: {counts}"
        write_results(out, "Intervals for new images", __doc__, facts, "\n\n".join(texts))


if __name__ == "__main__":
    main()
