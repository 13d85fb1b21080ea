"""The tables for a paper: two `tabular` environments that need the package booktabs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampcompare.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.report.base import MAX_LINE, Reporter
from ampcompare.report.columns import VERDICTS, columns, table_rows, verdict_rows
from ampcompare.report.published import published_legend, published_table
from ampcompare.report.terminal import legend, verdict_legend

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
        **{char: f"\\{char}" for char in "&%$#_{}"},
    }
)


def _escaped(text: str) -> str:
    return printable(text, MAX_LINE).translate(SPECIAL)


def _table(rows: Sequence[Sequence[str]], headers: Iterable[str], caption: str) -> str:
    names = list(headers)
    lines = [" & ".join(map(_escaped, row)) + r" \\" for row in [names, *rows]]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escaped(caption)}}}",
            rf"\begin{{tabular}}{{{'l' * len(names)}}}",
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
    """Measurements and verdicts; the reading is left to the author."""

    def render(self, comparison: Comparison) -> str:
        parts = [
            "% needs \\usepackage{booktabs}",
            _table(table_rows(comparison), columns(comparison), legend(comparison)),
        ]
        verdicts = verdict_rows(comparison)
        if verdicts:
            parts.append(_table(verdicts, VERDICTS, verdict_legend(comparison)))
        published = published_table(comparison)
        if published is not None:
            parts.append(_table(published[1], published[0], published_legend(comparison)))
        return "\n\n".join(parts) + "\n"
