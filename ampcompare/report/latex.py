"""The tables for a paper: `tabular` environments that need the package booktabs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampcompare.base.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.report.base import MAX_LINE, Reporter
from ampcompare.report.columns import columns, table_rows, verdict_columns, verdict_rows
from ampcompare.report.legends import legend, overview_legend, verdict_legend
from ampcompare.report.overview import make_overview
from ampcompare.report.published import published_legend, published_table

__all__ = ["Latex"]

SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
        "±": r"$\pm$",
        "Δ": r"$\Delta$",
        "≤": r"$\leq$",
        **{char: f"\\{char}" for char in "&%$#_{}"},
    }
)


def _escaped(text: str) -> str:
    return printable(text, MAX_LINE).translate(SPECIAL)


def _table(rows: Sequence[Sequence[str]], headers: Iterable[str], caption: str, numeric: Sequence[bool] = ()) -> str:
    """Return a table environment; columns that are `numeric` are aligned right."""
    names = list(headers)
    lines = [" & ".join(map(_escaped, row)) + r" \\" for row in [names, *rows]]
    sides = "".join("r" if right else "l" for right in numeric) or "l" * len(names)
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escaped(caption)}}}",
            rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


class Latex(Reporter):
    """The one table, then measurements and verdicts; the headline is a comment, since the text is the author's."""

    def render(self, comparison: Comparison) -> str:
        overview = make_overview(comparison, self.columns)
        lines = [*overview.facts, *overview_legend(comparison, overview.columns)]
        rows = [[cell.text for cell in row] for row in overview.rows]
        numeric = [column.numeric for column in overview.columns.values()]
        headline = [f"% {printable(sentence, MAX_LINE)}" for sentence in comparison.headline]
        parts = [
            "\n".join(["% needs \\usepackage{booktabs}", *headline]),
            _table(rows, overview.columns, " ".join(lines), numeric),
            _table(table_rows(comparison), columns(comparison), legend(comparison)),
        ]
        verdicts = verdict_rows(comparison)
        if verdicts:
            parts.append(_table(verdicts, verdict_columns(comparison), verdict_legend(comparison)))
        published = published_table(comparison)
        if published is not None:
            parts.append(_table(published[1], published[0], published_legend(comparison)))
        return "\n\n".join(parts) + "\n"
