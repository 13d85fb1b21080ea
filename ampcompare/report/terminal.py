"""The table and its reading for a terminal."""

from __future__ import annotations

import textwrap

from tabulate import tabulate

from ampcompare.record import Comparison
from ampcompare.report.base import COLUMNS, LONGEST_LINE, Reporter, printable, table_rows

__all__ = ["Terminal", "legend"]

WIDTH = 100


def legend(comparison: Comparison) -> str:
    """Return one line that says what the columns mean."""
    reference = printable(comparison.reference, 60)
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    return (
        f"top-1: final epoch, mean ± sd over seeds {seeds}; best: highest of any epoch; time / ref: step time to "
        f"{reference} over pairs, with the interval that holds for all arms at 95 %; skipped: steps."
    )


class Terminal(Reporter):
    """Plain text, in lines of any width for the table and 100 characters for the reading."""

    def render(self, comparison: Comparison) -> str:
        table = tabulate(table_rows(comparison), headers=list(COLUMNS), tablefmt="simple", disable_numparse=True)
        lines = [printable(line, LONGEST_LINE) for line in [legend(comparison), *comparison.reading]]
        return table + "\n\n" + "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines) + "\n"
