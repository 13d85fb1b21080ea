"""Documents on a terminal: one table that fits the width, its legend and the next step; on request all the rest."""

from __future__ import annotations

import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from ampcompare.base.formatting import format_few_names, printable_line
from ampcompare.results.report.base import MAX_LINE, Reporter
from ampcompare.results.report.document import (
    Block,
    Code,
    Document,
    Facts,
    Figure,
    Items,
    Section,
    Step,
    Table,
    Text,
    Tone,
)
from ampcompare.results.report.tables import grid_text, listing_text

WIDTH = 100  # of text in a file, and at most of text on a terminal
GAP = "  "
NUMBER = re.compile(r"([-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?)")
LAST_STEP = 7
NOTES = "notes"
MIN_NOTES = 14  # characters of the column of notes
MAX_NOTE_LINES = 3  # of a row; longer notes stand below the table
FOLDS = (None, 24, 16)
CODES: dict[Tone, str] = {"good": "32", "bad": "31", "open": "33", "muted": "2", "strong": "1"}


class Terminal(Reporter):
    """Plain text: headline, one table that fits the width, its legend and the next step; conclusions on request."""

    def document_text(self, document: Document) -> str:
        """Return the text: sections with an empty line between them, the first one strong."""
        shown = document.sections_in_format("details" if self.details else "table")
        texts = [
            self._section_text(section, "strong" if place == 0 else "") for place, section in enumerate(shown)
        ]
        return "\n\n".join(filter(None, texts)) + "\n"

    def _section_text(self, section: Section, tone: Tone) -> str:
        """Return the blocks of a section, with an empty line around tables and before what has a title."""
        text = ""
        after: Block | None = None
        for block in section.blocks:
            is_apart = isinstance(block, Table) or bool(getattr(block, "title", ""))
            between = "\n\n" if is_apart or isinstance(after, Table) else "\n"
            text += (between if text else "") + self._block_text(block, tone)
            after = block
        return text

    def _block_text(self, block: Block, tone: Tone) -> str:
        match block:
            case Text(sentences):
                return self._lines_text(sentences, tone)
            case Items():
                return self._items_text(block, tone)
            case Table():
                return self._table_text(block)
            case Step(why, command):
                commands = (
                    f"  {self._paint_text(line, 'strong')}" for line in command_lines(command, self.width)
                )
                return "\n".join([fold_paragraph(f"Next: {why}", self.width), *commands])
            case Code(text, title):
                lines = (
                    printable_line(line.expandtabs(4), MAX_LINE, keep_spaces=True)
                    for line in text.splitlines()
                )
                return "\n".join([*filter(None, [title]), *(f"    {line}" for line in lines)])
            case Facts():
                return self._facts_text(block)
            case Figure():
                return ""

    def _lines_text(self, texts: Iterable[str], tone: Tone = "") -> str:
        lines = (line for text in texts for line in fold_paragraph(text, self.width).splitlines())
        return "\n".join(self._paint_text(line, tone) for line in lines)

    def _items_text(self, items: Items, tone: Tone) -> str:
        """Return a list: lines, or below a title points, each with what supports it below it."""
        if not items.title:
            return self._lines_text((item for item, _ in items), tone)
        start = "  - " if len(items.items) > 1 else "  "
        texts = [self._lines_text([items.title])]
        for item, further in items:
            texts += [fold_paragraph(item, self.width, start, " " * len(start))]
            texts += [fold_paragraph(text, self.width, " " * 6) for text in further]
        return "\n".join(texts)

    def _facts_text(self, facts: Facts) -> str:
        """Return a line for each name; below a title the values stand below each other."""
        if not facts.title:
            return self._lines_text(f"{name}: {value}" for name, value in facts.pairs)
        names = [f"{GAP}{printable_line(name)}" for name, _ in facts.pairs]
        room = max(map(len, names)) + len(GAP)
        starts = [(name.ljust(room), value) for name, (_, value) in zip(names, facts.pairs, strict=True)]
        return "\n".join(
            [facts.title, *(fold_paragraph(value, self.width, start, " " * room) for start, value in starts)]
        )

    def _table_text(self, table: Table) -> str:
        legend = list(table.legend)
        if table.narrows:
            found = _lay_out_table(table, self.width, self._paint_text)
            text = "\n".join(found.lines)
            legend = [*found.below, *legend]
            if self.width is not None and not self.details:
                legend.append(_hidden_columns_line(found.hidden))
        else:
            layout = listing_text if table.prose else grid_text
            text = layout(table.texts, table.heads, self.width)
        named = f"{table.title}\n{text}" if table.title else text
        return "\n\n".join(filter(None, [named, self._lines_text(legend)]))

    def _paint_text(self, text: str, tone: Tone) -> str:
        return color_text(text, tone) if self.color else text


def _hidden_columns_line(hidden_columns: Sequence[str]) -> str:
    if hidden_columns:
        return f"Not shown at this width: {', '.join(hidden_columns)}. --details has them, and all other measurements."
    return "All measurements and conclusions: --details."


def fold_paragraph(text: str, width: int | None, first: str = "", rest: str | None = None) -> str:
    """Return text as lines of at most 100 characters, the first and the others with what stands before them."""
    room = min(width or WIDTH, WIDTH)
    joined = printable_line(text, MAX_LINE).replace(" %", "\u00a0%")  # no line begins with a percent sign
    below = f"{first}  " if rest is None else rest
    filled = textwrap.fill(
        joined, room, initial_indent=first, subsequent_indent=below, break_on_hyphens=False
    )
    return filled.replace("\u00a0", " ")


def command_lines(command: str, width: int | None) -> list[str]:
    """Return a command as lines that a shell takes for one, each indented by two by the caller, cut before options."""
    text = printable_line(command, MAX_LINE, keep_spaces=True)
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
class _TableText:
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
class _NarrowingChoice:
    """A way to make the table narrower."""

    step: int = 0
    stacked: bool = False
    fold: int | None = None
    notes_column: bool = True


def _lay_out_table(table: Table, width: int | None, paint: Paint) -> _TableText:
    """Return the table for a width, in characters; None for any width.

    The first of these that fits is taken, each with a column of notes or with the notes below: short words for
    verdicts, step times without their intervals, fewer columns; each also with heads of two lines and folded names.
    """
    if width is None:
        return _lay_out_by_choice(table, _NarrowingChoice(), None, paint) or _TableText([], [], [])
    for choice in _choices_narrower_and_narrower(table):
        found = _lay_out_by_choice(table, choice, width, paint)
        if found is not None:
            return found
    smallest = _NarrowingChoice(LAST_STEP, stacked=True, fold=FOLDS[-1], notes_column=False)
    return _lay_out_by_choice(table, smallest, None, paint) or _TableText([], [], [])


def _align_numbers(texts: Sequence[str]) -> list[str]:
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


def fold_name(name: str, width: int) -> list[str]:
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


def _choices_narrower_and_narrower(table: Table) -> Iterator[_NarrowingChoice]:
    longest = max((len(row[0].text) for row in table.rows), default=0)
    for step in range(LAST_STEP + 1):
        for folded in FOLDS:
            if folded is not None and longest <= folded:
                continue
            for stacked in (False, True):
                for notes_column in (True, False):
                    yield _NarrowingChoice(step, stacked, folded, notes_column)


class _ShownColumns(NamedTuple):
    """The columns of a table that a choice shows.

    Attributes:
        heads: the lines of each head.
        texts: for each column, the lines of each row.
        tones: for each column, that of each row.
        rights: for each column, whether its texts stand at its right.
    """

    heads: list[list[str]]
    texts: list[list[list[str]]]
    tones: list[list[Tone]]
    rights: list[bool]

    def widths(self) -> list[int]:
        return [
            max(_width_of_lines(head), *map(_width_of_lines, text))
            for head, text in zip(self.heads, self.texts, strict=True)
        ]

    def with_notes(self, notes: list[list[str]]) -> _ShownColumns:
        """Return these columns with one for the notes of each row, in lines, at the end."""
        blank: list[Tone] = ["" for _ in notes]
        return _ShownColumns(
            [*self.heads, [NOTES]], [*self.texts, notes], [*self.tones, blank], [*self.rights, False]
        )


def _lay_out_by_choice(
    table: Table, choice: _NarrowingChoice, width: int | None, paint: Paint
) -> _TableText | None:
    """Return the table made by a choice; None where it is too wide."""
    columns, notes = _shown_columns_and_notes(table, choice)
    everywhere, notes = _shared_note_lines_and_other_notes(table, notes)
    if choice.notes_column and any(notes):
        used = sum(len(GAP) + each for each in columns.widths())
        lines = _wrap_notes(notes, None if width is None else width - used)
        if lines is None:
            return None
        columns, notes = columns.with_notes(lines), []
    widths = columns.widths()
    if width is not None and sum(widths) + len(GAP) * (len(widths) - 1) > width:
        return None
    drawn = _draw_table_lines(columns, widths, len(table.rows), paint)
    return _TableText(
        drawn,
        [*everywhere, *_note_lines_with_names_of_rows(table, notes)],
        _dropped_and_shortened_columns(table, choice),
    )


def _shown_columns_and_notes(table: Table, choice: _NarrowingChoice) -> tuple[_ShownColumns, list[list[str]]]:
    """Return the columns that a choice shows, and the notes of each row: its own, and those of shortened cells."""
    columns = table.columns
    shown = [index for index, column in enumerate(columns) if not 0 < column.drop <= choice.step]
    short = {index for index in shown if 0 < columns[index].shorten <= choice.step}
    notes = []
    for row, its in zip(table.rows, table.notes or [()] * len(table.rows), strict=True):
        of_cells = filter(None, (row[index].note for index in short))
        notes.append([*of_cells, *its])

    texts = []
    for index in shown:
        cells = [row[index] for row in table.rows]
        column = [(cell.short if index in short else None) or cell.text for cell in cells]
        if columns[index].numeric:
            texts.append([[line] for line in _align_numbers(column)])
        elif index == shown[0] and choice.fold is not None:
            texts.append([fold_name(text, choice.fold) for text in column])
        else:
            texts.append([[text] for text in column])

    heads = [columns[index].head.rsplit(" ", 1 if choice.stacked else 0) for index in shown]
    tones: list[list[Tone]] = [[row[index].tone for row in table.rows] for index in shown]
    rights = [columns[index].numeric for index in shown]
    return _ShownColumns(heads, texts, tones, rights), notes


def _wrap_notes(notes: Sequence[Sequence[str]], room: int | None) -> list[list[str]] | None:
    """Return the notes of each row in lines of a width, None for any; None where that is too narrow for them."""
    if room is not None and room < MIN_NOTES:
        return None
    lines = []
    for its in notes:
        text = "; ".join(its)
        lines.append([text] if room is None else textwrap.wrap(text, room, break_on_hyphens=False) or [""])
    return None if any(len(each) > MAX_NOTE_LINES for each in lines) else lines


def _draw_table_lines(columns: _ShownColumns, widths: Sequence[int], count: int, paint: Paint) -> list[str]:
    """Return the lines of the head, a rule, and so many rows."""
    height = max(map(len, columns.heads))
    heads = [[*[""] * (height - len(head)), *head] for head in columns.heads]
    lines = _row_lines(heads, widths, [""] * len(heads), columns.rights, paint)
    lines.append(GAP.join("-" * width for width in widths))
    for index in range(count):
        cells = [column[index] for column in columns.texts]
        tones = [tone[index] for tone in columns.tones]
        lines += _row_lines(cells, widths, tones, columns.rights, paint)
    return lines


def _width_of_lines(lines: Sequence[str]) -> int:
    return max(map(len, lines), default=0)


def _row_lines(
    cells: Sequence[Sequence[str]],
    widths: Sequence[int],
    tones: Sequence[Tone],
    rights: Sequence[bool],
    paint: Paint,
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


def _note_lines_with_names_of_rows(table: Table, notes: Sequence[Sequence[str]]) -> list[str]:
    """Return the notes of rows as lines, each once with the names of its rows."""
    arms: dict[str, list[str]] = {}
    for row, its in zip(table.rows, notes, strict=False):
        for note in its:
            arms.setdefault(note, []).append(row[0].text)
    return [f"{_rows_phrase(names, table)}: {note}." for note, names in arms.items()]


def _rows_phrase(names: Sequence[str], table: Table) -> str:
    """Return the names of rows, or which few rows they are not."""
    others = [row[0].text for row in table.rows if row[0].text not in names]
    if len(names) > 2 and len(others) == 1:
        return f"All but {others[0]}"
    return "All arms" if len(names) > 2 and not others else format_few_names(names)


def _shared_note_lines_and_other_notes(
    table: Table, notes: list[list[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return lines for the notes of all rows but at most one, and the notes of each row without them."""
    counts = Counter(note for its in notes for note in its)
    shared = [note for note, count in counts.items() if count > 2 and count >= len(notes) - 1]
    lines = _note_lines_with_names_of_rows(table, [[note for note in its if note in shared] for its in notes])
    return lines, [[note for note in its if note not in shared] for its in notes]


def _dropped_and_shortened_columns(table: Table, choice: _NarrowingChoice) -> list[str]:
    dropped = [column for column in table.columns if 0 < column.drop <= choice.step]
    shortened = [
        column for column in table.columns if 0 < column.shorten <= choice.step and column not in dropped
    ]
    return [*(one.dropped for one in dropped), *(one.shortened for one in shortened if one.shortened)]


def has_color(stream: TextIO) -> bool:
    """Return whether text for a stream is colored: on a terminal, unless NO_COLOR or TERM=dumb say no.

    FORCE_COLOR colors what goes elsewhere too. An empty variable says nothing.

    Source: https://no-color.org, https://force-color.org.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def color_text(text: str, tone: Tone) -> str:
    """Return text between the codes of a tone."""
    return f"\x1b[{CODES[tone]}m{text}\x1b[0m" if tone and text.strip() else text
