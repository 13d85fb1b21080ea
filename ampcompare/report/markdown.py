"""The report as Markdown."""

from __future__ import annotations

from tabulate import tabulate

from ampcompare.record import Comparison
from ampcompare.report.base import COLUMNS, LONGEST_LINE, Reporter, printable, table_rows
from ampcompare.report.terminal import legend

__all__ = ["Markdown"]

SPECIAL = str.maketrans({char: f"\\{char}" for char in "\\`*_{}[]<>|#"})


def _escaped(text: str) -> str:
    return printable(text, LONGEST_LINE).translate(SPECIAL)


class Markdown(Reporter):
    """A GitHub-flavored table, the reading, and how to run it again."""

    def render(self, comparison: Comparison) -> str:
        rows = [[_escaped(cell) for cell in row] for row in table_rows(comparison)]
        table = tabulate(rows, headers=list(COLUMNS), tablefmt="pipe", disable_numparse=True)
        reading = "\n".join(f"- {_escaped(line)}" for line in comparison.reading)
        facts = "\n".join(
            f"- {_escaped(name)}: {_escaped(str(value))}" for name, value in comparison.environment.items()
        )
        command = printable(comparison.command, LONGEST_LINE).replace("`", "'")
        again = f"\n\n## Run it again\n\n```\n{command}\n```" if command else ""
        return (
            f"# Comparison\n\n{table}\n\n{_escaped(legend(comparison))}\n\n## Reading\n\n{reading}"
            f"\n\n## Environment\n\n{facts}{again}\n"
        )
