"""The one table of a comparison: a row per arm with accuracy, its verdict, times and memory, and lines below it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ampcompare.base.formatting import MIB, format_bytes, format_decimal, printable
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.records.metric import Metric
from ampcompare.records.run import RunRecord
from ampcompare.report.color import Tone
from ampcompare.report.columns import (
    Column,
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
from ampcompare.report.facts import fact_lines, row_notes

__all__ = ["Cell", "Overview", "OverviewColumn", "make_overview"]


@dataclass(frozen=True)
class Cell:
    """What stands in one cell of the table.

    Attributes:
        text: "-" where there is nothing.
        tone: of its color on a terminal and on a page.
        short: the text in a narrow table; None: the same.
        note: what `short` leaves out, as a note of the row.
    """

    text: str = "-"
    tone: Tone = ""
    short: str | None = None
    note: str = ""


@dataclass(frozen=True)
class OverviewColumn:
    """A column of the one table.

    Attributes:
        cell: of a row.
        numeric: whether it is aligned on the decimal point.
        needs_others: whether it is left out where only the reference has a number.
        shorten: step at which a table that is too wide takes the short text of its cells; 0 never.
        drop: step at which it leaves the column out; 0 never.
        lacking: what is then not shown, in words.
    """

    cell: Callable[[ArmSummary, Comparison], Cell]
    numeric: bool = True
    needs_others: bool = False
    shorten: int = 0
    drop: int = 0
    lacking: str = ""


@dataclass(frozen=True)
class Overview:
    """The one table, complete: a renderer chooses what fits.

    Attributes:
        columns: by their heads.
        rows: cells in the order of the columns, for each arm.
        notes: of each row.
        facts: lines below the table: what all arms share, which times do not count, what the columns mean.
    """

    columns: dict[str, OverviewColumn]
    rows: list[list[Cell]]
    notes: list[list[str]] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)


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


ARM = OverviewColumn(_arm, numeric=False)
DIFFERENCE = OverviewColumn(_difference, needs_others=True)
VERDICT = OverviewColumn(_verdict, numeric=False, shorten=1)
RATIO = OverviewColumn(_ratio, needs_others=True, shorten=2, drop=6, lacking="relative step times")


def ran_columns(metric: Metric) -> dict[str, OverviewColumn]:
    """Return the columns of a comparison that ran here; notes of rows are the last column where there is room."""
    return {
        "arm": ARM,
        printable(metric.head): OverviewColumn(_quality, shorten=7, lacking=f"sd of {printable(metric.name)}"),
        printable(metric.difference_head): DIFFERENCE,
        "verdict": VERDICT,
        "Δ tail loss (%)": OverviewColumn(_loss, needs_others=True, drop=1, lacking="tail losses"),
        "step (ms)": OverviewColumn(_step, drop=5, lacking="step times"),
        "rel. time": RATIO,
        "peak MiB": OverviewColumn(_peak, drop=4, lacking="peak memory"),
    }


def judged_columns(metric: Metric) -> dict[str, OverviewColumn]:
    """Return the columns of a table that someone else measured."""
    head = printable(metric.head)
    return {
        "arm": ARM,
        "runs": OverviewColumn(_runs, drop=3, lacking="numbers of runs"),
        head: OverviewColumn(_quality, shorten=7, lacking=f"sd of {head}"),
        printable(metric.difference_head): DIFFERENCE,
        "verdict": VERDICT,
        "rel. time": RATIO,
        "Δ memory": OverviewColumn(_memory, drop=4, lacking="differences in memory"),
    }


def make_overview(comparison: Comparison, asked: Sequence[str] = ()) -> Overview:
    """Return the table, without the columns that have no value in any row.

    Args:
        asked: heads of further columns.

    Raises:
        ConfigError: there is no such column.
    """
    if comparison.judged is not None:
        known = judged_columns(comparison.metric)
    else:
        known, records = ran_columns(comparison.metric), records_by_arm(comparison)
        for name, extra in columns(comparison).items():
            if extra.overview:
                known[name] = OverviewColumn(_extra(extra, records), drop=3, lacking=name)
        for name, extra in asked_columns(comparison, asked).items():
            known.setdefault(name, OverviewColumn(_extra(extra, records), drop=3, lacking=name))
    cells = {name: [column.cell(row, comparison) for row in comparison.arms] for name, column in known.items()}
    kept = {name: column for name, column in known.items() if _says(name, column, cells[name], comparison)}
    rows = [[cells[name][index] for name in kept] for index in range(len(comparison.arms))]
    return Overview(kept, rows, row_notes(comparison), fact_lines(comparison))


def _extra(column: Column, records: Mapping[str, Sequence[RunRecord]]) -> Callable[[ArmSummary, Comparison], Cell]:
    return lambda row, comparison: Cell(column(row, records.get(row.arm, ())))


def _says(name: str, column: OverviewColumn, cells: Sequence[Cell], comparison: Comparison) -> bool:
    """Return whether a column has a value that is not known before reading it."""
    if not column.numeric:
        return name == "arm" or any(cell.text not in ("-", "reference") for cell in cells)
    judged = zip(comparison.arms, cells, strict=True)
    looked_at = [cell for row, cell in judged if not (column.needs_others and is_reference(row, comparison))]
    return any(is_number(cell.text) for cell in looked_at)
