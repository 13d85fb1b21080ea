"""The tables and their reading for a terminal."""

from __future__ import annotations

import textwrap

from ampcompare.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.report.base import MAX_LINE, Reporter
from ampcompare.report.columns import VERDICTS, columns, table_rows, verdict_rows
from ampcompare.report.images import images_of_verdicts
from ampcompare.report.published import published_legend, published_table
from ampcompare.report.tables import grid

__all__ = ["WIDTH", "Terminal", "legend", "margin_words", "verdict_legend"]

WIDTH = 100


def legend(comparison: Comparison) -> str:
    """Return one line that says what the columns mean."""
    reference = printable(comparison.reference, 60)
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    over = f"mean ± sd over seeds {seeds}" if len(comparison.seeds) > 1 else f"seed {seeds}"
    return (
        f"top-1: final epoch, {over}; best: highest of any epoch; time / ref: step time to {reference} over pairs; "
        "skipped: steps."
    )


def margin_words(comparison: Comparison) -> str:
    """Return the margin of accuracy in points, with the rule that gave it and why."""
    shown = f"{comparison.margin:g} points of accuracy"
    rule = f"{comparison.margin_rule}: " if comparison.margin_rule == "auto" else ""
    return f"{shown} ({rule}{printable(comparison.margin_reason, 200)})" if comparison.margin_reason else shown


def verdict_legend(comparison: Comparison) -> str:
    """Return one line that says what the verdicts go by."""
    tests = (
        f"error rate {100 * comparison.error_rate:g} % over all arms (Holm). In brackets: the interval of the test "
        "that decided, two-sided 1 - 2 alpha for equivalent and non-inferior, 1 - alpha otherwise"
    )
    return (
        f"Verdicts against {printable(comparison.reference, 60)}, paired by seed. Equivalence margins: "
        f"{margin_words(comparison)}, {100 * comparison.time_margin:g} % of step time; "
        f"{tests if comparison.error_rate else 'nothing was tested'}. MiB: difference in peak memory. "
        + images_of_verdicts(comparison)
    )


class Terminal(Reporter):
    """Plain text: tables, folded to the width of the terminal, and conclusions in lines of at most 100 characters."""

    def render(self, comparison: Comparison) -> str:
        parts = [grid(table_rows(comparison), columns(comparison), self.width)]
        verdicts = verdict_rows(comparison)
        lines = [legend(comparison)]
        if verdicts:
            parts.append(grid(verdicts, VERDICTS, self.width))
            lines.append(verdict_legend(comparison))
        published = published_table(comparison)
        if published is not None:
            parts.append(grid(published[1], published[0], self.width))
            lines.append(published_legend(comparison))
        lines += comparison.reading
        width = min(self.width or WIDTH, WIDTH)
        filled = (textwrap.fill(printable(line, MAX_LINE), width, subsequent_indent="  ") for line in lines)
        return "\n\n".join([*parts, "\n".join(filled)]) + "\n"
