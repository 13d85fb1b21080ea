"""What single validation samples say: differences on these and on new ones, and pairs of single models."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from ampcompare.analysis.inference.effect import MIN_PAIRS
from ampcompare.analysis.verdicts.samples import samples_noun, two_digits
from ampcompare.base.formatting import printable
from ampcompare.records.comparison import ArmSummary, Comparison, ModelPair, SampleComparison
from ampcompare.report.columns import difference_interval, metric_interval
from ampcompare.report.tables import NamedTable

__all__ = ["sample_tables", "samples_of_verdicts"]


def samples_of_verdicts(comparison: Comparison) -> str:
    """Return one sentence: which samples the verdicts on the metric are about; "" where no run was evaluated."""
    counts = {epoch.samples for record in comparison.records for epoch in record.summary.epochs[-1:]}
    if not counts:
        return ""
    count = f"{min(counts):,}" if len(counts) == 1 else f"{min(counts):,} to {max(counts):,}"
    noun = samples_noun(comparison.records)
    return f"Verdicts on {comparison.metric.quality} are about these {count} validation {noun}."


def sample_tables(comparison: Comparison) -> Iterable[NamedTable]:
    """Yield the tables for which the comparison has results of single samples."""
    compared = [(row, row.samples) for row in comparison.arms if row.samples is not None]
    noun, metric = samples_noun(comparison.records), comparison.metric
    new = [_new_samples(row, its, comparison) for row, its in compared if its.low is not None]
    unit = f"{metric.difference_unit} of {metric.name}" if metric.difference_unit else metric.name
    if new:
        margin = metric.margin_text(comparison.margin)
        disagree = any(its.models for _, its in compared)
        yield NamedTable(
            f"These {noun}, or new ones",
            ["arm", f"on these {noun}", f"on new {noun}", f"{noun} for ±{margin}", *(["disagree"] if disagree else [])],
            [row if disagree else row[:-1] for row in new],
            f"Differences in {unit}, at the confidence of the verdict's interval. On new {noun}: {noun} and "
            f"seeds as crossed random effects. {noun.capitalize()} for ±{margin}: about how many would bring that "
            f"interval inside the margin with a power of 80 % if the arms do not differ."
            + (f" Disagree: {noun} on which just one model of a pair is right, on average." if disagree else ""),
        )
    single = [(row, pair) for row, its in compared if row.pairs < MIN_PAIRS for pair in its.models]
    if single:
        reference = printable(comparison.reference, 60)
        yield NamedTable(
            "These two models",
            ["arm", "seed", "right only here", f"right only in {reference}", "McNemar's p"],
            [_two_models(row, pair) for row, pair in single],
            f"Two single models on the same {noun}, McNemar's exact test. It is about these two models, not about the "
            f"arms that trained them: two seeds of one arm often differ as much.",
        )


def _new_samples(row: ArmSummary, its: SampleComparison, comparison: Comparison) -> list[str]:
    needed = "more seeds first"
    if its.needed is not None:
        needed = "enough" if its.needed <= its.samples else f"about {two_digits(its.needed):,}"
    disagreeing = statistics.fmean(pair.arm_only + pair.reference_only for pair in its.models) if its.models else 0.0
    return [
        printable(row.arm, 60),
        difference_interval(row, comparison),
        metric_interval(row.metric_difference or 0.0, its.low, its.high, comparison.metric, comparison.margin),
        needed,
        f"{disagreeing:.1f} of {its.samples:,}",
    ]


def _two_models(row: ArmSummary, pair: ModelPair) -> list[str]:
    return [printable(row.arm, 60), str(pair.seed), str(pair.arm_only), str(pair.reference_only), f"{pair.p:.3g}"]
