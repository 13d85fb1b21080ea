"""A comparison on a terminal: the answer, the one table, what to do next; on request all the rest."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from ampcompare.base.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.report.base import MAX_LINE, Reporter
from ampcompare.report.color import Tone, paint
from ampcompare.report.columns import columns, table_rows, verdict_columns, verdict_rows
from ampcompare.report.layout import lay_out
from ampcompare.report.legends import legend, margin_words, overview_legend, verdict_legend
from ampcompare.report.other_precisions import precision_table
from ampcompare.report.overview import make_overview
from ampcompare.report.published import published_legend, published_table
from ampcompare.report.samples import sample_tables
from ampcompare.report.tables import grid

__all__ = ["WIDTH", "Terminal", "legend", "margin_words", "paragraph", "verdict_legend"]

WIDTH = 100  # of text in a file, and at most of text on a terminal
MAX_STEPS = 2


class Terminal(Reporter):
    """Plain text: headline, one table that fits the width, its legend and the next step; conclusions on request.

    Args:
        width: as for `Reporter`.
        color: whether the terminal has colors.
        details: whether the tables of all measurements, the conclusions and the environment follow.
    """

    def __init__(self, width: int | None = None, *, color: bool = False, details: bool = False) -> None:
        super().__init__(width)
        self.color = color
        self.details = details

    def render(self, comparison: Comparison) -> str:
        parts = ["\n".join(self._headline(comparison)), *self._overview(comparison)]
        published = published_table(comparison)
        if published is not None:
            parts += [grid(published[1], published[0], self.width), self._text([published_legend(comparison)])]
        if (weights := precision_table(comparison)) is not None:
            parts += [f"{weights.title}\n\n{grid(weights.rows, weights.headers, self.width)}"]
            parts += [self._text([weights.legend])]
        if comparison.next_steps:
            parts.append("\n".join(self._next_steps(comparison)))
        if self.details:
            parts += self._details(comparison)
        return "\n\n".join(filter(None, parts)) + "\n"

    def _headline(self, comparison: Comparison) -> Iterable[str]:
        for sentence in comparison.headline or comparison.reading:
            for line in paragraph(sentence, self.width).splitlines():
                yield self._paint(line, "strong")

    def _overview(self, comparison: Comparison) -> Iterable[str]:
        overview = make_overview(comparison, self.columns)
        table = lay_out(overview, self.width, self._paint)
        yield "\n".join(table.lines)
        lines = [*table.below, *overview.facts, *overview_legend(comparison, overview.columns)]
        if self.width is not None and not self.details:
            lines.append(self._more(table.hidden))
        yield self._text(lines)

    @staticmethod
    def _more(hidden: Sequence[str]) -> str:
        if hidden:
            return f"Not shown at this width: {', '.join(hidden)}. --details has them, and all other measurements."
        return "All measurements and conclusions: --details."

    def _next_steps(self, comparison: Comparison) -> Iterable[str]:
        for step in comparison.next_steps[: None if self.details else MAX_STEPS]:
            yield paragraph(f"Next: {step.why}", self.width)
            yield "\n".join(f"  {self._paint(line, 'strong')}" for line in pasteable(step.command, self.width))

    def _details(self, comparison: Comparison) -> Iterable[str]:
        yield grid(table_rows(comparison), columns(comparison), self.width)
        yield self._text([legend(comparison)])
        verdicts = verdict_rows(comparison)
        if verdicts:
            yield grid(verdicts, verdict_columns(comparison), self.width)
            yield self._text([verdict_legend(comparison)])
        for table in sample_tables(comparison):
            yield f"{table.title}\n\n{grid(table.rows, table.headers, self.width)}"
            yield self._text([table.legend])
        if comparison.headline:  # else they stand at the top
            yield self._text(comparison.reading)
        yield self._text([f"{name}: {value}" for name, value in comparison.environment.items()])

    def _text(self, lines: Iterable[str]) -> str:
        return "\n".join(paragraph(line, self.width) for line in lines)

    def _paint(self, text: str, tone: Tone) -> str:
        return paint(text, tone) if self.color else text


def paragraph(text: str, width: int | None) -> str:
    """Return text as lines of at most 100 characters, the second and later ones indented."""
    room = min(width or WIDTH, WIDTH)
    joined = printable(text, MAX_LINE).replace(" %", "\u00a0%")  # no line begins with a percent sign
    filled = textwrap.fill(joined, room, subsequent_indent="  ", break_on_hyphens=False)
    return filled.replace("\u00a0", " ")


def pasteable(command: str, width: int | None) -> list[str]:
    """Return a command as lines that a shell takes for one, each indented by two by the caller, cut before options."""
    text = printable(command, MAX_LINE, keep_spaces=True)
    if width is None or len(text) + 2 <= width:
        return [text]
    lines = [""]
    for part in re.split(r" (?=--?[A-Za-z])", text):
        if lines[-1] and len(lines[-1]) + 1 + len(part) + 4 > width:
            lines[-1] += " \\"
            lines.append(f"  {part}")
        else:
            lines[-1] = f"{lines[-1]} {part}" if lines[-1] else part
    return lines
