"""The one table of a comparison: a row per arm with accuracy, its verdict, times and memory, and lines below it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ampcompare.base.formatting import MIB, format_bytes, format_decimal, printable
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.records.metric import Metric
from ampcompare.records.run import RunRecord
from ampcompare.report.columns import (
    ArmColumn,
    arm_name,
    asked_columns,
    columns,
    difference_interval,
    is_emulated,
    is_invalid,
    metric_text,
    ratio_interval,
    records_by_arm,
    step_milliseconds,
    time_tone,
    tone_of,
    word_and_detail,
)
from ampcompare.report.document import Cell, Column, Table
from ampcompare.report.facts import fact_lines, row_notes

__all__ = ["make_overview"]


def _nothing(row: ArmSummary, comparison: Comparison) -> Cell:
    return Cell()


@dataclass(frozen=True)
class OverviewColumn(Column):
    """A column of the one table.

    Attributes:
        cell: of a row.
        needs_others: whether it is left out where only the reference has a number.
    """

    numeric: bool = True
    cell: Callable[[ArmSummary, Comparison], Cell] = _nothing
    needs_others: bool = False


def is_number(text: str) -> bool:
    """Return whether a text begins with a number."""
    return text.lstrip("+-")[:1].isdigit()


def is_reference(row: ArmSummary, comparison: Comparison) -> bool:
    """Return whether others are compared with a row."""
    references = [comparison.reference] if comparison.judged is None else comparison.judged.references
    return row.arm in references


def _arm(row: ArmSummary, comparison: Comparison) -> Cell:
    return Cell(arm_name(row))


def _quality(row: ArmSummary, comparison: Comparison) -> Cell:
    if row.metric_mean is None:
        return Cell()
    metric = comparison.metric
    return Cell(metric_text(metric, row.metric_mean, row.metric_sd), short=metric_text(metric, row.metric_mean))


def _difference(row: ArmSummary, comparison: Comparison) -> Cell:
    if row.metric_difference is None or is_reference(row, comparison):
        return Cell()
    return Cell(difference_interval(row, comparison))


def _verdict(row: ArmSummary, comparison: Comparison) -> Cell:
    word, detail = word_and_detail(row.accuracy_verdict)
    if not word:
        if row.failed and not row.completed:
            return Cell("failed", "bad")
        if is_reference(row, comparison):
            return Cell("reference", "muted")
        return Cell(printable(row.status, 20), "muted") if row.status == "not run" else Cell()
    text = f"{word} ({detail})" if word == "inconclusive" and detail else word
    return Cell(text, tone_of(word), short=word, note=detail if text != word else "")


def _loss(row: ArmSummary, comparison: Comparison) -> Cell:
    if row.loss_difference is None or is_reference(row, comparison):
        return Cell()
    word = word_and_detail(row.loss_verdict)[0]
    return Cell(f"{format_decimal(100 * row.loss_difference, 2, '+')} {word}".strip(), tone_of(word))


def _step(row: ArmSummary, comparison: Comparison) -> Cell:
    text = step_milliseconds(row)
    return Cell(text, "" if is_number(text) else "muted")


def _ratio(row: ArmSummary, comparison: Comparison) -> Cell:
    if is_reference(row, comparison):
        return Cell("1.00") if row.completed and not is_invalid(row) else Cell()
    if row.time_ratio is None:
        return Cell()
    if is_emulated(row) and not row.time_verdict.startswith("invalid"):
        return Cell("emulated", "muted", short="-")
    if row.time_verdict.startswith(("invalid", "not comparable")):
        return Cell(row.time_verdict.partition(" (")[0].removesuffix(" measurement"), "muted", short="-")
    text = ratio_interval(row, comparison)
    return Cell(text, time_tone(row.time_verdict), short=text.partition(" ")[0])


def _peak(row: ArmSummary, comparison: Comparison) -> Cell:
    if row.peak_bytes is None:
        return Cell()
    size = row.peak_bytes / MIB
    return Cell(f"{size:,.{1 if size < 1000 else 0}f}")


def _runs(row: ArmSummary, comparison: Comparison) -> Cell:
    return Cell(str(row.completed + row.diverged))


def _memory(row: ArmSummary, comparison: Comparison) -> Cell:
    if row.memory_difference is None:
        return Cell()
    return Cell(f"{'-' if row.memory_difference < 0 else '+'}{format_bytes(abs(row.memory_difference))}")


ARM = OverviewColumn("arm", numeric=False, cell=_arm)
VERDICT = OverviewColumn("verdict", numeric=False, cell=_verdict, shorten=1)
RATIO = OverviewColumn(
    "rel. time",
    cell=_ratio,
    needs_others=True,
    shorten=2,
    shortened="intervals of rel. time",
    drop=6,
    dropped="relative step times",
)


def _columns_of_quality(metric: Metric) -> list[OverviewColumn]:
    head, difference = printable(metric.head), printable(metric.difference_head)
    return [
        OverviewColumn(head, cell=_quality, shorten=7, shortened=f"sd of {printable(metric.name)}"),
        OverviewColumn(difference, cell=_difference, needs_others=True),
        VERDICT,
    ]


def ran_columns(metric: Metric) -> list[OverviewColumn]:
    """Return the columns of a comparison that ran here; notes of rows are the last column where there is room."""
    return [
        ARM,
        *_columns_of_quality(metric),
        OverviewColumn("Δ tail loss (%)", cell=_loss, needs_others=True, drop=1, dropped="tail losses"),
        OverviewColumn("step (ms)", cell=_step, drop=5, dropped="step times"),
        RATIO,
        OverviewColumn("peak MiB", cell=_peak, drop=4, dropped="peak memory"),
    ]


def judged_columns(metric: Metric) -> list[OverviewColumn]:
    """Return the columns of a table that someone else measured."""
    return [
        ARM,
        OverviewColumn("runs", cell=_runs, drop=3, dropped="numbers of runs"),
        *_columns_of_quality(metric),
        RATIO,
        OverviewColumn("Δ memory", cell=_memory, drop=4, dropped="differences in memory"),
    ]


def make_overview(comparison: Comparison, asked: Sequence[str] = ()) -> Table:
    """Return the table, without the columns that have no value in any row; below it what all arms share.

    Args:
        asked: heads of further columns.

    Raises:
        ConfigError: there is no such column.
    """
    if comparison.judged is not None:
        known = judged_columns(comparison.metric)
    else:
        known, records = ran_columns(comparison.metric), records_by_arm(comparison)
        extra = {name: column for name, column in columns(comparison).items() if column.overview}
        for name, column in (extra | asked_columns(comparison, asked)).items():
            if all(one.head != name for one in known):
                known.append(OverviewColumn(name, cell=_extra(column, records), drop=3, dropped=name))
    cells = {column.head: [column.cell(row, comparison) for row in comparison.arms] for column in known}
    kept = [column for column in known if _says(column, cells[column.head], comparison)]
    rows = [[cells[column.head][index] for column in kept] for index in range(len(comparison.arms))]
    notes = row_notes(comparison)
    return Table(kept, rows, legend=fact_lines(comparison), notes=notes if any(notes) else (), narrows=True)


def _extra(column: ArmColumn, records: Mapping[str, Sequence[RunRecord]]) -> Callable[[ArmSummary, Comparison], Cell]:
    return lambda row, comparison: Cell(column(row, records.get(row.arm, ())))


def _says(column: OverviewColumn, cells: Sequence[Cell], comparison: Comparison) -> bool:
    """Return whether a column has a value that is not known before reading it."""
    if not column.numeric:
        return column is ARM or any(cell.text not in ("-", "reference") for cell in cells)
    judged = zip(comparison.arms, cells, strict=True)
    looked_at = [cell for row, cell in judged if not (column.needs_others and is_reference(row, comparison))]
    return any(is_number(cell.text) for cell in looked_at)
