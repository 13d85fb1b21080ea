"""The tables and their reading for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from ampcompare.comparison import Comparison
from ampcompare.report.base import LONGEST_LINE, VERDICTS, Reporter, columns, printable, table_rows, verdict_rows
from ampcompare.report.beside import published_legend, published_table

__all__ = ["WIDTH", "Terminal", "legend", "verdict_legend"]

WIDTH = 100


def legend(comparison: Comparison) -> str:
    """Return one line that says what the columns mean."""
    reference = printable(comparison.reference, 60)
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    return (
        f"top-1: final epoch, mean ± sd over seeds {seeds}; best: highest of any epoch; time / ref: step time to "
        f"{reference} over pairs; skipped: steps."
    )


def verdict_legend(comparison: Comparison) -> str:
    """Return one line that says what the verdicts go by."""
    return (
        f"Verdicts against {printable(comparison.reference, 60)} over pairs of equal seeds: accuracy by a margin of "
        f"{comparison.margin:g} points, time by {100 * comparison.time_margin:g} %, at 95 % for all arms (Holm); "
        "in brackets intervals that hold together; MiB: difference of the largest peaks."
    )


class Terminal(Reporter):
    """Plain text, in lines of any width for the tables and 100 characters for the reading."""

    def render(self, comparison: Comparison) -> str:
        parts = [_table(table_rows(comparison), columns(comparison))]
        verdicts = verdict_rows(comparison)
        lines = [legend(comparison)]
        if verdicts:
            parts.append(_table(verdicts, VERDICTS))
            lines.append(verdict_legend(comparison))
        published = published_table(comparison)
        if published is not None:
            parts.append(_table(published[1], published[0]))
            lines.append(published_legend(comparison))
        lines += comparison.reading
        filled = (textwrap.fill(printable(line, LONGEST_LINE), WIDTH, subsequent_indent="  ") for line in lines)
        return "\n\n".join([*parts, "\n".join(filled)]) + "\n"


def _table(rows: Sequence[Sequence[str]], headers: Iterable[str]) -> str:
    text: str = tabulate(rows, headers=list(headers), tablefmt="simple", disable_numparse=True)
    return text
