"""A comparison on a terminal: the answer, the one table, what to do next; on request all the rest."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ampcompare.base.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.report.base import MAX_LINE, Reporter
from ampcompare.report.color import Tone, paint
from ampcompare.report.columns import columns, table_rows, verdict_columns, verdict_rows
from ampcompare.report.facts import few
from ampcompare.report.legends import legend, margin_words, overview_legend, sample_tables, verdict_legend
from ampcompare.report.other_precisions import precision_table
from ampcompare.report.overview import Cell, Overview, make_overview
from ampcompare.report.published import published_legend, published_table
from ampcompare.report.tables import grid

__all__ = ["WIDTH", "Judged", "Terminal", "fold", "legend", "margin_words", "paragraph", "verdict_legend"]

WIDTH = 100  # of text in a file, and at most of text on a terminal
MAX_STEPS = 2
GAP = "  "
NUMBER = re.compile(r"([-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?)")
LAST_STEP = 7
NOTES = "notes"
MIN_NOTES = 14  # characters of the column of notes
MAX_NOTE_LINES = 3  # of a row; longer notes stand below the table
FOLDS = (None, 24, 16)


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
        table = _lay_out(overview, self.width, self._paint)
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


Paint = Callable[[str, Tone], str]


@dataclass(frozen=True)
class _LaidOut:
    """A table as text.

    Attributes:
        lines: of the table, at most as long as the width where that was possible.
        below: lines for below the table: the notes that have no column.
        hidden: what is left out for lack of room.
    """

    lines: list[str]
    below: list[str]
    hidden: list[str]


@dataclass(frozen=True)
class _Choice:
    """A way to make the table narrower."""

    step: int = 0
    stacked: bool = False
    fold: int | None = None
    notes_column: bool = True


def _lay_out(overview: Overview, width: int | None, paint: Paint = lambda text, tone: text) -> _LaidOut:
    """Return the table for a width, in characters; None for any width.

    The first of these that fits is taken, each with a column of notes or with the notes below: short words for
    verdicts, step times without their intervals, fewer columns; each also with heads of two lines and folded names.

    Args:
        paint: of the text of a cell in its tone.
    """
    if width is None:
        return _laid_out(overview, _Choice(), None, paint) or _LaidOut([], [], [])
    for choice in _choices(overview):
        found = _laid_out(overview, choice, width, paint)
        if found is not None:
            return found
    smallest = _Choice(LAST_STEP, stacked=True, fold=FOLDS[-1], notes_column=False)
    return _laid_out(overview, smallest, None, paint) or _LaidOut([], [], [])


def _aligned(texts: Sequence[str]) -> list[str]:
    """Return texts of one width, whose numbers stand below each other, the first on its decimal point."""
    parts = [NUMBER.split(text) for text in texts]
    numbers = [part[1::2] if not part[0] else [] for part in parts]  # none in a text such as "emulated"
    found = [each for each in numbers if each]
    whole = max((len(each[0].partition(".")[0]) for each in found), default=0)
    rest = max((len(each[0]) - len(each[0].partition(".")[0]) for each in found), default=0)
    most = max(map(len, found), default=0)
    sizes = [max(len(each[index]) for each in found if len(each) > index) for index in range(1, most)]
    shown = []
    for text, part, its in zip(texts, parts, numbers, strict=True):
        if not its:
            shown.append(" " * max(0, whole - 1) + "-" if text == "-" else text)
            continue
        before = len(its[0].partition(".")[0])
        padded = [(" " * (whole - before) + its[0]).ljust(whole + rest)]
        padded += [number.rjust(size) for number, size in zip(its[1:], sizes, strict=False)]
        shown.append("".join(number + between for number, between in zip(padded, part[2::2], strict=True)))
    width = max(map(len, shown), default=0)
    return [
        text.ljust(width) if its or text.strip() == "-" else text.rjust(width)
        for text, its in zip(shown, numbers, strict=True)
    ]


def fold(name: str, width: int) -> list[str]:
    """Return a name on several lines of a width, cut after punctuation where there is some."""
    lines = [""]
    for piece in re.findall(r"[^,:=+ ]*[,:=+ ]|[^,:=+ ]+", name):
        indent = "  " if len(lines) > 1 or lines[0] else ""
        if len(lines[-1] + piece.rstrip()) > width and lines[-1].strip():
            lines.append(indent)
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], "  " + lines[-1][width:]]
    return [line.rstrip() for line in lines]


def _choices(overview: Overview) -> Iterator[_Choice]:
    longest = max((len(row[0].text) for row in overview.rows), default=0)
    for step in range(LAST_STEP + 1):
        for folded in FOLDS:
            if folded is not None and longest <= folded:
                continue
            for stacked in (False, True):
                for notes_column in (True, False):
                    yield _Choice(step, stacked, folded, notes_column)


def _laid_out(overview: Overview, choice: _Choice, width: int | None, paint: Paint) -> _LaidOut | None:
    """Return the table made by a choice; None where it is too wide."""
    columns = list(overview.columns.items())
    shown = [index for index, (_, column) in enumerate(columns) if not 0 < column.drop <= choice.step]
    short = {index for index in shown if 0 < columns[index][1].shorten <= choice.step}
    rows = [[_text(row[index], index in short) for index in shown] for row in overview.rows]
    notes = [
        [*filter(None, (row[index].note for index in short)), *its]
        for row, its in zip(overview.rows, overview.notes, strict=True)
    ]
    names = [_head(columns[index][0], choice.stacked) for index in shown]
    texts = []
    for number, index in enumerate(shown):
        column = [row[number] for row in rows]
        if columns[index][1].numeric:
            texts.append([[line] for line in _aligned(column)])
        elif number == 0 and choice.fold is not None:
            texts.append([fold(text, choice.fold) for text in column])
        else:
            texts.append([[text] for text in column])
    tones: list[list[Tone]] = [[row[index].tone for row in overview.rows] for index in shown]
    rights = [columns[index][1].numeric for index in shown]
    everywhere, notes = _shared_notes(overview, notes)
    if choice.notes_column and any(notes):
        used = sum(len(GAP) + max(_widest(head), *map(_widest, text)) for head, text in zip(names, texts, strict=True))
        room = None if width is None else width - used
        if room is not None and room < MIN_NOTES:
            return None
        wrapped = ["; ".join(its) for its in notes]
        filled = [
            [text] if room is None else textwrap.wrap(text, room, break_on_hyphens=False) or [""] for text in wrapped
        ]
        if any(len(lines) > MAX_NOTE_LINES for lines in filled):
            return None
        names, rights = [*names, [NOTES]], [*rights, False]
        texts, tones = [*texts, filled], [*tones, ["" for _ in notes]]
        notes = []
    widths = [max(_widest(head), *map(_widest, text)) for head, text in zip(names, texts, strict=True)]
    if width is not None and sum(widths) + len(GAP) * (len(widths) - 1) > width:
        return None
    lines = _head_lines(names, widths, rights)
    for index in range(len(rows)):
        lines += _row_lines([column[index] for column in texts], widths, [tone[index] for tone in tones], rights, paint)
    return _LaidOut(lines, [*everywhere, *_grouped(overview, notes)], _hidden(overview, choice))


def _text(cell: Cell, short: bool) -> str:
    return cell.text if not short or cell.short is None else cell.short


def _head(name: str, stacked: bool) -> list[str]:
    return name.rsplit(" ", 1) if stacked else [name]


def _widest(lines: Sequence[str]) -> int:
    return max(map(len, lines), default=0)


def _head_lines(names: Sequence[Sequence[str]], widths: Sequence[int], rights: Sequence[bool]) -> list[str]:
    height = max(map(len, names))
    full = [[*([""] * (height - len(head))), *head] for head in names]
    lines = [
        GAP.join(_justified(head[index], width, right) for head, width, right in zip(full, widths, rights, strict=True))
        for index in range(height)
    ]
    return [*(line.rstrip() for line in lines), GAP.join("-" * width for width in widths)]


def _row_lines(
    cells: Sequence[Sequence[str]], widths: Sequence[int], tones: Sequence[Tone], rights: Sequence[bool], paint: Paint
) -> list[str]:
    lines = []
    for index in range(max(map(len, cells))):
        line = ""
        for number, (cell, width, tone, right) in enumerate(zip(cells, widths, tones, rights, strict=True)):
            text = cell[index] if index < len(cell) else ""
            blank = " " * (width - len(text))
            last = number == len(cells) - 1
            line += blank + paint(text, tone) if right else paint(text, tone) + ("" if last else blank)
            line += "" if last else GAP
        lines.append(line.rstrip())
    return lines


def _justified(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def _grouped(overview: Overview, notes: Sequence[Sequence[str]]) -> list[str]:
    """Return the notes of rows as lines, each once with the names of its rows."""
    arms: dict[str, list[str]] = {}
    for row, its in zip(overview.rows, notes, strict=False):
        for note in its:
            arms.setdefault(note, []).append(row[0].text)
    return [f"{_whose(names, overview)}: {note}." for note, names in arms.items()]


def _whose(names: Sequence[str], overview: Overview) -> str:
    """Return the names of rows, or which few rows they are not."""
    others = [row[0].text for row in overview.rows if row[0].text not in names]
    if len(names) > 2 and len(others) == 1:
        return f"All but {others[0]}"
    return "All arms" if len(names) > 2 and not others else few(names)


def _shared_notes(overview: Overview, notes: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return lines for the notes of all rows but at most one, and the notes of each row without them."""
    counts = Counter(note for its in notes for note in its)
    shared = [note for note, count in counts.items() if count > 2 and count >= len(notes) - 1]
    lines = _grouped(overview, [[note for note in its if note in shared] for its in notes])
    return lines, [[note for note in its if note not in shared] for its in notes]


def _hidden(overview: Overview, choice: _Choice) -> list[str]:
    columns = overview.columns
    left_out = [column.lacking for column in columns.values() if 0 < column.drop <= choice.step]
    if "rel. time" in columns and columns["rel. time"].shorten <= choice.step < columns["rel. time"].drop:
        left_out.append("intervals of rel. time")
    if choice.step >= LAST_STEP:
        left_out += [column.lacking for column in columns.values() if column.shorten == LAST_STEP]
    return left_out


class Judged(Terminal):
    """As `Terminal`, in the unit of the table; its details are every column, in parts below each other."""

    def _details(self, comparison: Comparison) -> Iterable[str]:
        overview = make_overview(comparison)
        yield grid([[cell.text for cell in row] for row in overview.rows], overview.columns, self.width)
        if comparison.headline:
            yield self._text(comparison.reading)
