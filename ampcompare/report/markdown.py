"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from ampcompare.base.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.report.base import MAX_LINE, Reporter
from ampcompare.report.columns import columns, table_rows, verdict_columns, verdict_rows
from ampcompare.report.legends import legend, overview_legend, sample_tables, verdict_legend
from ampcompare.report.other_precisions import precision_table
from ampcompare.report.overview import make_overview
from ampcompare.report.published import published_legend, published_table

__all__ = ["Markdown", "escaped", "pipe_table"]

SPECIAL = str.maketrans({char: f"\\{char}" for char in "\\`*_{}[]<>|#~"})
LINKS = (("://", r"\://"), ("www.", r"www\."), ("@", r"\@"))  # which a viewer would make a link without any brackets


def escaped(text: str) -> str:
    """Return text as one line in which nothing is markup."""
    shown = printable(text, MAX_LINE).translate(SPECIAL)
    for start, inert in LINKS:
        shown = shown.replace(start, inert)
    return shown


def pipe_table(rows: Sequence[Sequence[str]], headers: Iterable[str], numeric: Sequence[bool] = ()) -> str:
    """Return a table of GitHub's Markdown.

    Args:
        numeric: whether each column is aligned right; without it all are aligned left.
    """
    cells = [[escaped(cell) for cell in row] for row in rows]
    names = [escaped(name) for name in headers]
    sides = ["right" if right else "left" for right in numeric] or ["left"] * len(names)
    text: str = tabulate(
        cells, headers=names, tablefmt="pipe", disable_numparse=True, colalign=sides if cells else None
    )
    return text


class Markdown(Reporter):
    """The answer and the one table first; then GitHub-flavored tables of everything, conclusions, and the command."""

    def render(self, comparison: Comparison) -> str:
        parts = [f"# Comparison{f': {escaped(comparison.tag)}' if comparison.tag else ''}"]
        if comparison.headline:
            parts.append(" ".join(map(escaped, comparison.headline)))
        parts += self._overview(comparison)
        for step in comparison.next_steps:
            parts += [f"Next: {escaped(step.why)}", _block(step.command)]
        parts += [
            "## Measurements",
            pipe_table(table_rows(comparison), columns(comparison)),
            escaped(legend(comparison)),
        ]
        verdicts = verdict_rows(comparison)
        if verdicts:
            parts += [
                "## Verdicts",
                pipe_table(verdicts, verdict_columns(comparison)),
                escaped(verdict_legend(comparison)),
            ]
        weights = precision_table(comparison)
        for table in [*([] if weights is None else [weights]), *sample_tables(comparison)]:
            parts += [f"## {table.title}", pipe_table(table.rows, table.headers), escaped(table.legend)]
        published = published_table(comparison)
        if published is not None:
            parts += ["## Published and measured", pipe_table(published[1], published[0])]
            parts += [escaped(published_legend(comparison))]
        parts += ["## Conclusions", "\n".join(f"- {escaped(line)}" for line in comparison.reading)]
        facts = [f"- {escaped(name)}: {escaped(str(value))}" for name, value in comparison.environment.items()]
        parts += ["## Environment", "\n".join(facts)]
        if comparison.command:
            parts += ["## Reproduce", _block(comparison.command)]
        return "\n\n".join(parts) + "\n"

    def _overview(self, comparison: Comparison) -> Iterable[str]:
        overview = make_overview(comparison, self.columns)
        rows = [[cell.text for cell in row] for row in overview.rows]
        heads, numeric = list(overview.columns), [column.numeric for column in overview.columns.values()]
        if any(overview.notes):
            rows = [[*row, "; ".join(notes)] for row, notes in zip(rows, overview.notes, strict=True)]
            heads, numeric = [*heads, "notes"], [*numeric, False]
        yield pipe_table(rows, heads, numeric)
        lines = [*overview.facts, *overview_legend(comparison, overview.columns)]
        yield "\n\n".join(map(escaped, lines))


def _block(command: str) -> str:
    return f"```\n{printable(command, MAX_LINE).replace('`', chr(39))}\n```"
