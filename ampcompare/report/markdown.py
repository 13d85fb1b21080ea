"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from ampcompare.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.report.base import MAX_LINE, Reporter
from ampcompare.report.columns import VERDICTS, columns, table_rows, verdict_rows
from ampcompare.report.images import image_tables
from ampcompare.report.published import published_legend, published_table
from ampcompare.report.terminal import legend, verdict_legend

__all__ = ["Markdown", "escaped"]

SPECIAL = str.maketrans({char: f"\\{char}" for char in "\\`*_{}[]<>|#~"})
LINKS = (("://", r"\://"), ("www.", r"www\."), ("@", r"\@"))  # which a viewer would make a link without any brackets


def escaped(text: str) -> str:
    """Return text as one line in which nothing is markup."""
    shown = printable(text, MAX_LINE).translate(SPECIAL)
    for start, inert in LINKS:
        shown = shown.replace(start, inert)
    return shown


def _table(rows: Sequence[Sequence[str]], headers: Iterable[str]) -> str:
    cells = [[escaped(cell) for cell in row] for row in rows]
    text: str = tabulate(cells, headers=list(headers), tablefmt="pipe", disable_numparse=True)
    return text


class Markdown(Reporter):
    """GitHub-flavored tables, the conclusions, and the command that reproduces them."""

    def render(self, comparison: Comparison) -> str:
        title = f"# Comparison{f': {escaped(comparison.tag)}' if comparison.tag else ''}"
        parts = [title, _table(table_rows(comparison), columns(comparison)), escaped(legend(comparison))]
        verdicts = verdict_rows(comparison)
        if verdicts:
            parts += ["## Verdicts", _table(verdicts, VERDICTS), escaped(verdict_legend(comparison))]
        for table in image_tables(comparison):
            parts += [f"## {table.title}", _table(table.rows, table.headers), escaped(table.legend)]
        published = published_table(comparison)
        if published is not None:
            parts += ["## Published and measured", _table(published[1], published[0])]
            parts += [escaped(published_legend(comparison))]
        parts += ["## Conclusions", "\n".join(f"- {escaped(line)}" for line in comparison.reading)]
        facts = [f"- {escaped(name)}: {escaped(str(value))}" for name, value in comparison.environment.items()]
        parts += ["## Environment", "\n".join(facts)]
        if comparison.command:
            command = printable(comparison.command, MAX_LINE).replace("`", "'")
            parts += ["## Reproduce", f"```\n{command}\n```"]
        return "\n\n".join(parts) + "\n"
