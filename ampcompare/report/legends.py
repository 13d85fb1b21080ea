"""What the columns of the tables mean, in a line for each table."""

from __future__ import annotations

from collections.abc import Collection

from ampcompare.analysis.answer.phrases import sentence_start
from ampcompare.analysis.runs.script_pairs import are_pairs
from ampcompare.base.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.report.samples import samples_of_verdicts

__all__ = ["legend", "margin_words", "overview_legend", "verdict_legend"]


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
        + samples_of_verdicts(comparison)
    )
