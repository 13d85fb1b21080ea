"""The table of figures that someone else measured, with its verdicts."""

from __future__ import annotations

import textwrap

from ampcompare.formatting import format_bytes, printable
from ampcompare.records.comparison import ArmSummary, Comparison, JudgedTable
from ampcompare.report.base import MAX_LINE, Reporter
from ampcompare.report.columns import VERDICTS
from ampcompare.report.tables import grid
from ampcompare.report.terminal import WIDTH, margin_words

__all__ = ["Judged"]


class Judged(Reporter):
    """Plain text: one row per arm, measurement and verdict side by side, in the unit of the table."""

    def render(self, comparison: Comparison) -> str:
        table = comparison.judged or JudgedTable(metric="top-1 %", unit="points", references=[comparison.reference])
        has_values = any(row.top1_mean is not None or row.diverged for row in comparison.arms)
        cells = [self._cells(row, table, has_values) for row in comparison.arms]
        shown = [name for name in cells[0] if any(row[name] != "-" for row in cells)]
        text = grid([[row[name] for name in shown] for row in cells], shown, self.width)
        lines = [_legend(comparison, table), *comparison.reading]
        width = min(self.width or WIDTH, WIDTH)
        filled = [textwrap.fill(printable(line, MAX_LINE), width, subsequent_indent="  ") for line in lines]
        return text + "\n\n" + "\n".join(filled) + "\n"

    @staticmethod
    def _cells(row: ArmSummary, table: JudgedTable, has_values: bool) -> dict[str, str]:
        is_reference = row.arm in table.references
        verdicts = {name: column(row) for name, column in VERDICTS.items()}
        accuracy = verdicts["accuracy"]
        return {
            "arm": verdicts["arm"],
            "runs": str(row.completed + row.diverged),
            printable(table.metric, 40): _mean(row, table),
            table.unit or "difference": "-" if is_reference else _difference(row, table),
            _verdict_head(table): "reference" if is_reference and accuracy == "-" and has_values else accuracy,
            "time ratio": "reference"
            if is_reference and not has_values
            else "-"
            if is_reference
            else verdicts["step time"],
            "time": verdicts["time"],
            "memory": _memory(row.memory_difference),
        }


def _verdict_head(table: JudgedTable) -> str:
    return "accuracy" if table.metric.startswith("top-1") else "verdict"


def _mean(row: ArmSummary, table: JudgedTable) -> str:
    if row.top1_mean is None:
        return "-"
    spread = "" if row.top1_sd is None else f" ± {table.factor * row.top1_sd:.{table.decimals}f}"
    return f"{table.factor * row.top1_mean:.{table.decimals}f}{spread}"


def _difference(row: ArmSummary, table: JudgedTable) -> str:
    values = [row.top1_difference, row.top1_difference_low, row.top1_difference_high]
    mean, low, high = ("-" if value is None else f"{table.factor * value:+.{table.decimals}f}" for value in values)
    return mean if low == "-" or high == "-" else f"{mean} ({low} to {high})"


def _memory(difference: int | None) -> str:
    """Return a difference of sizes in the unit that fits it."""
    if difference is None:
        return "-"
    return f"{'-' if difference < 0 else '+'}{format_bytes(abs(difference))}"


def _legend(comparison: Comparison, table: JudgedTable) -> str:
    quality = printable(table.metric, 40)
    margin = margin_words(comparison)
    if not table.metric.startswith("top-1"):
        reason = f" ({printable(comparison.margin_reason, 200)})" if comparison.margin_reason else ""
        margin = f"{comparison.margin:g}{f' {table.unit}' if table.unit else ''} of {quality}{reason}"
    direction = f" {quality}: lower is better." if table.better == "lower" else ""
    spread = (
        "" if table.sd is None else f", with a published spread of {table.sd:g} {table.unit}".rstrip() + " over seeds"
    )
    blocks = ""
    if table.within:
        names = " and ".join(printable(name, 40) for name in table.within)
        blocks = (
            f" The first rows are over all values of {names}; these and the rows of single values are tested apart."
        )
    return (
        f"Against {printable(comparison.reference, 60)}.{direction} Equivalence margins: {margin}{spread}, "
        f"{100 * comparison.time_margin:g} % of time; error rate {100 * comparison.error_rate:g} % over all arms "
        f"(Holm). In brackets: the interval of the test that decided.{blocks}"
    )
