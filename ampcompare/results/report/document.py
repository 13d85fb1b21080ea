"""A report before it has a format: sections of texts, lists, tables and figures, which every format renders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ampcompare.results.report.outlines import OUTLINES

Tone = Literal["", "good", "bad", "open", "muted", "strong"]


@dataclass(frozen=True)
class Text:
    """A paragraph: sentences, each of which begins a line where lines are short."""

    sentences: Sequence[str]


@dataclass(frozen=True)
class Items:
    """A list, each item with the lines that support it.

    Attributes:
        items: a text alone, or with its lines.
        title: above the list; "" for none.
    """

    items: Sequence[str | tuple[str, Sequence[str]]]
    title: str = ""

    def __iter__(self) -> Iterator[tuple[str, Sequence[str]]]:
        return ((item, ()) if isinstance(item, str) else item for item in self.items)


@dataclass(frozen=True)
class Code:
    """Lines of a program or a command, which stay as they are."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Facts:
    """Names with values, in groups, each with its name or without.

    A value is a text, or several texts, each with those that have it.
    """

    groups: Sequence[tuple[str, Sequence[tuple[str, str | Sequence[tuple[str, str]]]]]]
    title: str = ""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The names, each with its values as one text."""
        pairs = []
        for _, group in self.groups:
            for name, value in group:
                text = value if isinstance(value, str) else "; ".join(f"{one} ({its})" for one, its in value)
                pairs.append((name, text))
        return pairs


@dataclass(frozen=True)
class Step:
    """What to do next: the reason, and a command."""

    why: str
    command: str


@dataclass(frozen=True)
class Cell:
    """What stands in one cell of a table.

    Attributes:
        text: "-" where there is nothing.
        tone: of its color on a terminal and on a page.
        short: the text in a narrow table; None: the same.
        note: what `short` leaves out, as a note of the row.
        badge: whether it is a verdict or a state in words, which a page shows as a badge in its tone.
        value: what a spreadsheet has: a number in full precision, or text; None for nothing.
    """

    text: str = "-"
    tone: Tone = ""
    short: str | None = None
    note: str = ""
    badge: bool = False
    value: object = None


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        numeric: whether it is aligned on the decimal point.
        shorten: step at which a table that is too wide takes the short text of its cells; 0 never.
        shortened: what is then not shown, in words; "" where notes of rows say it.
        drop: step at which it leaves the column out; 0 never.
        dropped: what is then not shown, in words.
    """

    head: str
    numeric: bool = False
    shorten: int = 0
    shortened: str = ""
    drop: int = 0
    dropped: str = ""


@dataclass(frozen=True)
class Table:
    """A table, complete: a renderer chooses what fits.

    Attributes:
        title: what stands above it wherever it is shown.
        legend: lines below it: what it means, and what its rows share.
        notes: of each row; none for a table that has no notes.
        states: of each row: the tone of what became of its runs, where its notes begin with that.
        narrows: whether it is the one table of a document: a narrow terminal shortens and drops its columns, rather
            than continuing them below, and a page shows the looks of its rows.
        caption: what it is called where its title is not shown; "" for the title.
        prose: whether its cells are sentences, of which a terminal folds the last one of each row.
        links: of each row: address of its log, or "".
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    legend: Sequence[str] = ()
    notes: Sequence[Sequence[str]] = ()
    states: Sequence[Tone] = ()
    narrows: bool = False
    caption: str = ""
    prose: bool = False
    links: Sequence[str] = ()

    @classmethod
    def from_rows(
        cls,
        heads: Iterable[str],
        rows: Iterable[Sequence[str | Cell]],
        title: str = "",
        legend: str = "",
        **options: Any,
    ) -> Table:
        """Return a table of cells or plain texts.

        Args:
            heads: of the columns.
            rows: as long as `heads`.
            title: of the table; "" for none.
            legend: a sentence under it; "" for none.
            options: further attributes.
        """
        cells = [[Cell(it) if isinstance(it, str) else it for it in row] for row in rows]
        return cls([Column(head) for head in heads], cells, title, [legend] if legend else [], **options)

    @classmethod
    def for_programs(cls, heads: Iterable[str], rows: Iterable[Sequence[object]]) -> Table:
        """Return a table for other programs: numbers in full precision.

        Args:
            heads: of the columns.
            rows: numbers, texts or None, as long as `heads`.
        """
        return cls(
            [Column(head) for head in heads], [[Cell("", value=value) for value in row] for row in rows]
        )

    @property
    def heads(self) -> list[str]:
        """The heads of its columns."""
        return [column.head for column in self.columns]

    @property
    def texts(self) -> list[list[str]]:
        """The texts of its cells."""
        return [[cell.text for cell in row] for row in self.rows]


@dataclass(frozen=True)
class Figure:
    """A figure, for formats that draw.

    Attributes:
        kind: of the drawing: the name of a macro of `figures.html.j2`.
        make: returns what that draws.
        is_bare: whether it consists of shapes alone, without a table or words that say the same: where they cannot be
            drawn, nothing is left of it.
    """

    kind: str
    make: Callable[[], Any]
    is_bare: bool = False

    @cached_property
    def data(self) -> Any:
        """What is drawn."""
        return self.make()


MAX_OPEN = 12  # rows
Block = Text | Items | Code | Facts | Step | Table | Figure


@dataclass(frozen=True)
class Section:
    """A part of a document.

    Attributes:
        name: by which outlines choose it.
        content: its blocks, or what makes them once a format shows the section.
        title: heading in formats of long pages; "" where the blocks have titles, or need none.
        fold: "closed" or "open" where a page folds it; "" where it does not.
    """

    name: str
    content: Sequence[Block] | Callable[[], Sequence[Block]]
    title: str = ""
    fold: str = ""

    @cached_property
    def blocks(self) -> Sequence[Block]:
        """Its blocks."""
        return self.content() if callable(self.content) else self.content

    @property
    def has_only_empty_figures(self) -> bool:
        """Whether all its blocks are figures that have nothing to draw, and say why."""
        return all(isinstance(block, Figure) and getattr(block.data, "sentence", "") for block in self.blocks)

    @property
    def is_empty_without_figures(self) -> bool:
        """Whether nothing is left of it where figures cannot be drawn."""
        return all(isinstance(block, Figure) and block.is_bare for block in self.blocks)


@dataclass(frozen=True)
class Document:
    """A report of a result.

    Attributes:
        kind: of the result, by which outlines say what each format shows; "" for one that is shown whole.
        sections: all there is to show; those without a block are left out.
        data: the result itself.
        name: of the report; "" for none.
        title: what it says, in one sentence.
        subtitle: what it is about, one word or sentence each.
        warnings: what a reader must know first.
        rows: of the result, such as arms: each has a look of its own in figures.
        reference: the row that others are compared with.
    """

    kind: str
    sections: Sequence[Section]
    data: Any = field(default=None, repr=False)
    name: str = ""
    title: str = ""
    subtitle: Sequence[str] = ()
    warnings: Sequence[str] = ()
    rows: Sequence[str] = ()
    reference: str = ""

    def sections_in_format(self, form: str) -> list[Section]:
        """Return the sections that a format shows, in its order."""
        outlines = OUTLINES.get(self.kind, {})
        return self.sections_of(
            outlines.get(form, outlines.get("md", [section.name for section in self.sections]))
        )

    def sections_of(self, outline: Sequence[str]) -> list[Section]:
        """Return the sections of an outline that have blocks, each once."""
        known = {section.name: section for section in self.sections}
        found = []
        for entry in outline:
            names, mark = entry.rstrip("+*!?"), entry[-1]
            names, _, most = names.partition(":")
            name = next((name for name in names.split("|") if name in known and known[name].blocks), None)
            if name is not None and not (mark == "?" and known[name].has_only_empty_figures):
                section = known.pop(name)
                blocks = section.blocks[: int(most) if most else None]
                fold = _word_for_open_or_closed(mark, blocks) or section.fold
                title = section.title
                if fold and not title and isinstance(blocks[0], Table):
                    title, blocks = blocks[0].title, [replace(blocks[0], title="", caption=blocks[0].title)]
                found.append(Section(name, blocks, title, fold))
        return found


def _word_for_open_or_closed(mark: str, blocks: Sequence[Block]) -> str:
    is_short = all(len(block.rows) <= MAX_OPEN for block in blocks if isinstance(block, Table))
    return {"+": "closed", "!": "open", "*": "open" if is_short else "closed"}.get(mark, "")
