"""What single validation images say: differences on these images and on new ones, and pairs of single models."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampcompare.analysis.samples import two_digits
from ampcompare.analysis.statistics import MIN_PAIRS
from ampcompare.formatting import printable
from ampcompare.records.comparison import ArmSummary, Comparison, ImageComparison, ModelPair
from ampcompare.report.columns import difference_interval
from ampcompare.report.intervals import format_interval

__all__ = ["ImageTable", "image_tables", "images_of_verdicts"]


@dataclass(frozen=True)
class ImageTable:
    """A table of its own, with a title and a line that says what it means."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str


def images_of_verdicts(comparison: Comparison) -> str:
    """Return one sentence: which images the verdicts on accuracy are about; "" where no run was evaluated."""
    counts = {epoch.samples for record in comparison.records for epoch in record.summary.epochs[-1:]}
    if not counts:
        return ""
    count = f"{min(counts):,}" if len(counts) == 1 else f"{min(counts):,} to {max(counts):,}"
    return f"Verdicts on accuracy are about these {count} validation images."


def image_tables(comparison: Comparison) -> Iterable[ImageTable]:
    """Yield the tables for which the comparison has per-image results."""
    compared = [(row, row.images) for row in comparison.arms if row.images is not None]
    new = [_new_images(row, images, comparison) for row, images in compared if images.low is not None]
    if new:
        margin = f"{comparison.margin:g}"
        yield ImageTable(
            "These images, or new ones",
            ["arm", "on these images", "on new images", f"images for ±{margin}", "disagree"],
            new,
            "Differences in pp of top-1, at the confidence of the verdict's interval. On new images: images and "
            f"seeds as crossed random effects. Images for ±{margin}: about how many would bring that interval inside "
            "the margin with a power of 80 %, if the arms do not differ. Disagree: images on which just one model of a "
            "pair is right, on average.",
        )
    single = [(row, pair) for row, images in compared if row.pairs < MIN_PAIRS for pair in images.models]
    if single:
        reference = printable(comparison.reference, 60)
        yield ImageTable(
            "These two models",
            ["arm", "seed", "right only here", f"right only in {reference}", "McNemar's p"],
            [_two_models(row, pair) for row, pair in single],
            "Two single models on the same images, McNemar's exact test. It is about these two models, not about what "
            "trained them: two seeds of one arm often differ as much.",
        )


def _new_images(row: ArmSummary, images: ImageComparison, comparison: Comparison) -> list[str]:
    low, high = 100 * (images.low or 0.0), 100 * (images.high or 0.0)
    limits = (-comparison.margin, 0.0, comparison.margin)
    needed = "more seeds first"
    if images.needed is not None:
        needed = "enough" if images.needed <= images.images else f"about {two_digits(images.needed):,}"
    disagreeing = statistics.fmean(pair.arm_only + pair.reference_only for pair in images.models)
    return [
        printable(row.arm, 60),
        difference_interval(row, comparison),
        format_interval(100 * (row.metric_difference or 0.0), low, high, limits, sign="+"),
        needed,
        f"{disagreeing:.1f} of {images.images:,}",
    ]


def _two_models(row: ArmSummary, pair: ModelPair) -> list[str]:
    return [printable(row.arm, 60), str(pair.seed), str(pair.arm_only), str(pair.reference_only), f"{pair.p:.3g}"]
