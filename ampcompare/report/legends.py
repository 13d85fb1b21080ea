"""What the columns of the tables mean, in a line for each table."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable

from ampcompare.analysis.answer.phrases import sentence_start
from ampcompare.analysis.inference.effect import MIN_PAIRS
from ampcompare.analysis.runs.comparability import are_pairs
from ampcompare.analysis.verdicts.samples import samples_noun, two_digits
from ampcompare.base.formatting import printable
from ampcompare.records.comparison import ArmSummary, Comparison, ModelPair, SampleComparison
from ampcompare.report.columns import difference_interval, metric_interval
from ampcompare.report.tables import NamedTable

__all__ = ["legend", "margin_words", "overview_legend", "sample_tables", "verdict_legend"]


def overview_legend(comparison: Comparison, shown: Collection[str]) -> list[str]:
    """Return a few lines: what the verdicts of the one table go by, and what its columns mean.

    Args:
        shown: heads of its columns.
    """
    others = [row for row in comparison.arms if row.arm != comparison.reference]
    if not others:
        return []
    table, metric = comparison.judged, comparison.metric
    quality, unit = printable(metric.name), printable(metric.difference_unit)
    of = "of " if metric.difference != "points" else ""
    margin = f"±{comparison.margin:g}{f' {unit}' if unit else ''} {of}{quality}"
    if comparison.margin_rule == "auto":
        margin += " (auto)"
    tested = [row for row in others if row.metric_difference_low is not None or row.time_ratio_low is not None]
    interval = "[ ]: interval of the deciding test, " if tested else ""
    rate = (
        f"error rate {100 * comparison.error_rate:g} % over all arms" if comparison.error_rate else "nothing was tested"
    )
    if comparison.look is not None and comparison.look > 1:
        rate = f"look {comparison.look} at these runs, {rate}"
    spread = f"; published sd {table.sd:g} {unit}".rstrip() if table and table.sd is not None else ""
    direction = f" {sentence_start(quality)}: lower is better." if metric.better == "lower" else ""
    against = f"against {printable(comparison.reference, 60)}, {_paired(comparison)}"
    lines = [
        f"Δ and verdict: {against}; {interval}{rate}.{direction} "
        f"Margins: {margin}, ±{100 * comparison.time_margin:g} % step time{spread}."
    ]
    if "rel. time" in shown:
        lines[0] += f" rel. time: step time / that of {printable(comparison.reference, 60)}."
    if "Δ tail loss (%)" in shown:
        lines.append(
            f"Δ tail loss: training loss over the last fifth of the steps, relative to that of the reference; margin "
            f"±{100 * comparison.loss_margin:g} %, tested separately at the same error rate."
        )
    if table and table.within:
        names = " and ".join(printable(name, 40) for name in table.within)
        lines.append(
            f"The first rows are over all values of {names}; these and the rows of single values are tested separately."
        )
    return lines


def _paired(comparison: Comparison) -> str:
    if are_pairs(comparison.records, comparison.reference):
        return "paired by seed"
    return "runs of a seed are not all pairs"


def legend(comparison: Comparison) -> str:
    """Return one line that says what the columns mean."""
    reference = printable(comparison.reference, 60)
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    over = f"mean ± sd over seeds {seeds}" if len(comparison.seeds) > 1 else f"seed {seeds}"
    metric = comparison.metric
    best = "highest" if metric.better == "higher" else "lowest"
    return (
        f"{printable(metric.name)}: final epoch, {over}; best: {best} of any epoch; rel. time: step time / that of "
        f"{reference}, over pairs."
    )


def margin_words(comparison: Comparison) -> str:
    """Return the margin of the metric, with the rule that gave it and why."""
    unit = comparison.metric.difference_unit.replace("pp", "points")
    of = f"{unit} of {comparison.metric.quality}".strip()
    shown = f"{comparison.margin:g} {printable(of)}"
    rule = f"{comparison.margin_rule}: " if comparison.margin_rule == "auto" else ""
    return f"{shown} ({rule}{printable(comparison.margin_reason, 200)})" if comparison.margin_reason else shown


def verdict_legend(comparison: Comparison) -> str:
    """Return one line that says what the verdicts go by."""
    tests = (
        f"error rate {100 * comparison.error_rate:g} % over all arms (Holm). [ ]: interval of the test "
        "that decided, two-sided 1 - 2 alpha for equivalent and non-inferior, 1 - alpha otherwise"
    )
    judged = any(row.loss_verdict for row in comparison.arms)
    loss = f", {100 * comparison.loss_margin:g} % of tail loss" if judged else ""
    return (
        f"Verdicts against {printable(comparison.reference, 60)}, {_paired(comparison)}. Equivalence margins: "
        f"{margin_words(comparison)}, {100 * comparison.time_margin:g} % of step time{loss}; "
        f"{tests if comparison.error_rate else 'nothing was tested'}. Δ peak MiB: difference in peak memory. "
        + _samples_of_verdicts(comparison)
    )


def _samples_of_verdicts(comparison: Comparison) -> str:
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
