"""The table of figures that someone else measured, with its verdicts."""

from __future__ import annotations

import textwrap

from ampcompare.formatting import printable
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.report.base import MAX_LINE, Reporter
from ampcompare.report.columns import COLUMNS, VERDICTS
from ampcompare.report.tables import grid
from ampcompare.report.terminal import WIDTH, margin_words

__all__ = ["Judged"]


class Judged(Reporter):
    """Plain text: one row per arm, measurement and verdict side by side.

    Args:
        sd: standard deviation over seeds, in points, that was given with the table.
        width: of the terminal, which the table is folded to; None for no limit.
    """

    def __init__(self, sd: float | None = None, width: int | None = None) -> None:
        super().__init__(width)
        self.sd = sd

    def render(self, comparison: Comparison) -> str:
        cells = [self._cells(row, comparison.reference) for row in comparison.arms]
        shown = [name for name in cells[0] if any(row[name] != "-" for row in cells)]
        table = grid([[row[name] for name in shown] for row in cells], shown, self.width)
        lines = [self._legend(comparison), *comparison.reading]
        width = min(self.width or WIDTH, WIDTH)
        filled = [textwrap.fill(printable(line, MAX_LINE), width, subsequent_indent="  ") for line in lines]
        return table + "\n\n" + "\n".join(filled) + "\n"

    @staticmethod
    def _cells(row: ArmSummary, reference: str) -> dict[str, str]:
        verdicts = {name: column(row) for name, column in VERDICTS.items()}
        if row.arm == reference:
            verdicts |= {
                "top-1 points": "-",
                "step time": "-",
                "accuracy": printable(row.accuracy_verdict) or "reference",
            }
        runs = row.completed + row.diverged
        return {
            "arm": verdicts["arm"],
            "runs": str(runs),
            "top-1 %": COLUMNS["top-1 %"](row),
            "points": verdicts["top-1 points"],
            "accuracy": verdicts["accuracy"],
            "time ratio": verdicts["step time"],
            "time": verdicts["time"],
            "MiB": verdicts["MiB"],
        }

    def _legend(self, comparison: Comparison) -> str:
        spread = f", with a published spread of {self.sd:g} points over seeds" if self.sd is not None else ""
        return (
            f"Against {printable(comparison.reference, 60)}. Equivalence margins: "
            f"{margin_words(comparison)}{spread}, {100 * comparison.time_margin:g} % of time; error rate "
            f"{100 * comparison.error_rate:g} % over all arms (Holm). In brackets: the "
            "interval of the test that decided."
        )
