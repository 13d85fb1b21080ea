"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from ampcompare.comparison import Comparison
from ampcompare.report.base import LONGEST_LINE, VERDICTS, Reporter, columns, printable, table_rows, verdict_rows
from ampcompare.report.beside import published_legend, published_table
from ampcompare.report.terminal import legend, verdict_legend

__all__ = ["Markdown"]

SPECIAL = str.maketrans({char: f"\\{char}" for char in "\\`*_{}[]<>|#"})


def _escaped(text: str) -> str:
    return printable(text, LONGEST_LINE).translate(SPECIAL)


def _table(rows: Sequence[Sequence[str]], headers: Iterable[str]) -> str:
    escaped = [[_escaped(cell) for cell in row] for row in rows]
    text: str = tabulate(escaped, headers=list(headers), tablefmt="pipe", disable_numparse=True)
    return text


class Markdown(Reporter):
    """GitHub-flavored tables, the reading, and how to run it again."""

    def render(self, comparison: Comparison) -> str:
        title = f"# Comparison{f': {_escaped(comparison.tag)}' if comparison.tag else ''}"
        parts = [title, _table(table_rows(comparison), columns(comparison)), _escaped(legend(comparison))]
        verdicts = verdict_rows(comparison)
        if verdicts:
            parts += ["## Verdicts", _table(verdicts, VERDICTS), _escaped(verdict_legend(comparison))]
        published = published_table(comparison)
        if published is not None:
            parts += ["## Published and measured", _table(published[1], published[0])]
            parts += [_escaped(published_legend(comparison))]
        parts += ["## Reading", "\n".join(f"- {_escaped(line)}" for line in comparison.reading)]
        facts = [f"- {_escaped(name)}: {_escaped(str(value))}" for name, value in comparison.environment.items()]
        parts += ["## Environment", "\n".join(facts)]
        if comparison.command:
            command = printable(comparison.command, LONGEST_LINE).replace("`", "'")
            parts += ["## Run it again", f"```\n{command}\n```"]
        return "\n\n".join(parts) + "\n"
