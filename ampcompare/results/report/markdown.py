"""The report as Markdown."""

from collections.abc import Iterator

from tabulate import tabulate

from ampcompare.base.formatting import printable_line
from ampcompare.results.report.base import MAX_LINE, Reporter
from ampcompare.results.report.document import Block, Code, Document, Facts, Figure, Items, Step, Table, Text

SPECIAL = str.maketrans({char: f"\\{char}" for char in "\\`*_{}[]<>|#~"})
# which a viewer would make a link without any brackets
LINKS = (("://", r"\://"), ("www.", r"www\."), ("@", r"\@"))


def escape_markdown(text: str) -> str:
    """Return text as one line in which nothing is markup."""
    shown = printable_line(text, MAX_LINE).translate(SPECIAL)
    for start, inert in LINKS:
        shown = shown.replace(start, inert)
    return shown


class Markdown(Reporter):
    """GitHub-flavored Markdown: headings, tables and code blocks, in which nothing but these is markup."""

    def document_text(self, document: Document) -> str:
        parts = [f"# {escape_markdown(document.name)}"] if document.name else []
        for section in document.sections_in_format("md"):
            parts += _heading_lines(section.title)
            for block in section.blocks:
                parts += _block_paragraphs(block)
        return "\n\n".join(parts) + "\n"


def _heading_lines(title: str) -> list[str]:
    return [f"## {escape_markdown(title)}"] if title else []


def _block_paragraphs(block: Block) -> list[str]:
    """Return the paragraphs of a block."""
    match block:
        case Text(sentences):
            return [" ".join(map(escape_markdown, sentences))]
        case Items():
            return [*_heading_lines(block.title), "\n".join(_bullet_lines(block))]
        case Table():
            return [*_heading_lines(block.title), _markdown_table(block), *map(escape_markdown, block.legend)]
        case Step(why, command):
            return [f"Next: {escape_markdown(why)}", _fenced_code(printable_line(command, MAX_LINE))]
        case Code(text, title):
            return [*_heading_lines(title), _fenced_code(text)]
        case Facts():
            return [
                *_heading_lines(block.title),
                "\n".join(
                    f"- {escape_markdown(name)}: {escape_markdown(value)}" for name, value in block.pairs
                ),
            ]
        case Figure():
            return []


def _bullet_lines(items: Items) -> Iterator[str]:
    for item, further in items:
        yield f"- {escape_markdown(item)}"
        yield from (f"  - {escape_markdown(text)}" for text in further)


def _markdown_table(table: Table) -> str:
    heads = table.heads
    rows = table.texts
    numeric = [column.numeric for column in table.columns]
    if table.notes:
        rows = [[*row, "; ".join(notes)] for row, notes in zip(rows, table.notes, strict=True)]
        heads, numeric = [*heads, "notes"], [*numeric, False]
    sides = ["right" if right else "left" for right in numeric]
    text: str = tabulate(
        [[escape_markdown(cell) for cell in row] for row in rows],
        headers=[escape_markdown(head) for head in heads],
        tablefmt="pipe",
        disable_numparse=True,
        colalign=sides if rows else None,
    )
    return text


def _fenced_code(text: str) -> str:
    lines = "\n".join(printable_line(line, MAX_LINE, keep_spaces=True) for line in text.splitlines())
    return f"```\n{lines.replace('`', chr(39))}\n```"
