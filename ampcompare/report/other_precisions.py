"""The table of trained weights in other precisions than that of their arm."""

from __future__ import annotations

from ampcompare.base.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.records.evaluation import PrecisionRow
from ampcompare.records.metric import Metric
from ampcompare.records.run import RunRecord
from ampcompare.report.columns import metric_interval, metric_text
from ampcompare.report.tables import NamedTable

__all__ = ["evaluated_name", "precision_table", "values_in_precisions"]


def precision_table(comparison: Comparison) -> NamedTable | None:
    """Return the table: a line for each arm and precision; None where nothing was evaluated so."""
    rows, metric = comparison.precisions, comparison.metric
    if not rows:
        return None
    moved = any(row.sample_difference is not None for row in rows)
    answered = any(row.disagreement is not None for row in rows)
    unit = f" ({metric.difference_unit})" if metric.difference_unit else ""
    headers = ["arm", "evaluated in", metric.head, "own", f"Δ to own{unit}"]
    headers += ["differing answers %"] if answered else []
    headers += [f"mean |Δ| of a sample ({metric.name})"] if moved else []
    legend = [
        f"The trained weights of each arm, evaluated in other precisions. Own: in the arm's own precision; Δ: to "
        f"that, paired by seed{_with_interval(rows)}."
    ]
    if answered:
        legend.append("Differing answers: share of decisions that differ from the arm's own evaluation.")
    return NamedTable(
        "Trained weights in other precisions",
        [printable(head, 60) for head in headers],
        [_line(row, metric, comparison.margin, answered=answered, moved=moved) for row in rows],
        " ".join(legend),
    )


def _with_interval(rows: list[PrecisionRow]) -> str:
    return ", with its 95 % interval, each tested alone" if any(row.low is not None for row in rows) else ""


def _line(row: PrecisionRow, metric: Metric, margin: float, *, answered: bool, moved: bool) -> list[str]:
    line = [printable(row.arm, 60), evaluated_name(row)]
    if row.metric_mean is None or row.difference is None:
        return [*line, printable(f"failed: {row.error}", 80), "-", "-", *["-"] * (answered + moved)]
    line += [metric_text(metric, row.metric_mean), metric_text(metric, row.own_mean)]
    line.append(metric_interval(row.difference, row.low, row.high, metric, margin))
    if answered:
        line.append("-" if row.disagreement is None else f"{100 * row.disagreement:.2f}")
    if moved:
        line.append("-" if row.sample_difference is None else f"{metric.factor * row.sample_difference:.2g}")
    return line


def evaluated_name(row: PrecisionRow) -> str:
    """Return a precision as the table names it, with how it was computed where that was emulated."""
    emulated = " (emulated)" if row.half and row.half.endswith("emulated") else ""
    return f"{printable(row.precision, 40)}{emulated}{', EMA' if row.averaged else ''}"


def values_in_precisions(record: RunRecord) -> dict[str, float | None]:
    """Return what one run reached in each precision, by the names of columns of the CSV."""
    found: dict[str, float | None] = {}
    for result in record.summary.in_precisions:
        name = f"{'ema_' if result.averaged else ''}in_{result.precision.replace(':', '_')}"
        found[name] = result.values.get(record.metric.name)
        found[f"{name}_differing"] = (
            result.differing / result.answers if result.differing is not None and result.answers else None
        )
    return found
