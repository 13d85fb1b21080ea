"""What lint reports, and how a fix changes the text."""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from ampcompare.source.syntax import SourceLines

__all__ = ["Edit", "Finding", "Text", "apply_edits"]


@dataclass(frozen=True, order=True)
class Edit:
    """A piece of the text that is replaced, by offsets in characters."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, eq=False)
class Finding:
    """A mistake at a place.

    Attributes:
        code: of the mistake.
        line: from 1, in the text of the document.
        column: from 0, in characters.
        message: what was seen here, without the remedy.
        edits: of the fix, which belong together; none where no fix is sure.
        last_line: of the statement, whose comments may silence it.
    """

    code: str
    line: int
    column: int
    message: str
    edits: tuple[Edit, ...] = field(default=())
    last_line: int = 0


class Text(SourceLines):
    """A text with the places of nodes in it, and the edits of fixes."""

    def column(self, line: int, column: int) -> int:
        """Return a column in characters."""
        return self.offset(line, column) - self.line_start(line)

    def start(self, node: ast.expr | ast.stmt) -> int:
        """Return where a node begins."""
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Return where a node ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.end_lineno, node.end_col_offset)

    def source(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node as it is written."""
        return self.text[self.start(node) : self.end(node)]

    def line_of(self, offset: int) -> int:
        """Return the line of a character."""
        return bisect_right(self.starts, offset)

    def indent(self, node: ast.stmt) -> str:
        """Return the blanks in front of a statement."""
        start = self.line_start(node.lineno)
        line = self.text[start : self.start(node)]
        return line if not line.strip() else ""

    def stands_alone(self, node: ast.stmt) -> bool:
        """Return whether a statement has its lines for itself: no other one, and no comment that speaks of two."""
        before = self.text[self.line_start(node.lineno) : self.start(node)]
        after = self.text[self.end(node) : self.line_start((node.end_lineno or node.lineno) + 1)].strip()
        return not before.strip() and (not after or after.startswith("#"))

    def newline(self) -> str:
        """Return the newline of the text."""
        return "\r\n" if "\r\n" in self.text else "\n"

    # What fixes are made of.

    def insert_before(self, statement: ast.stmt, line: str) -> tuple[Edit, ...]:
        """Return the edit that puts a line above a statement, or none where other code is on its line."""
        if not self.stands_alone(statement):
            return ()
        start = self.line_start(statement.lineno)
        return (Edit(start, start, f"{self.indent(statement)}{line}{self.newline()}"),)

    def insert_after(self, statement: ast.stmt, line: str) -> tuple[Edit, ...]:
        """Return the edit that puts a line below a statement."""
        if not self.stands_alone(statement):
            return ()
        end = self.line_start((statement.end_lineno or statement.lineno) + 1)
        opening = "" if self.text[:end].endswith(("\n", "\r")) else self.newline()
        return (Edit(end, end, f"{opening}{self.indent(statement)}{line}{self.newline()}"),)

    def delete(self, statement: ast.stmt) -> tuple[Edit, ...]:
        """Return the edit that removes a statement with its lines."""
        if not self.stands_alone(statement):
            return ()
        end = self.line_start((statement.end_lineno or statement.lineno) + 1)
        return (Edit(self.line_start(statement.lineno), end, ""),)

    def replace(self, node: ast.expr | ast.stmt, text: str) -> tuple[Edit, ...]:
        """Return the edit that replaces a node by other text."""
        return (Edit(self.start(node), self.end(node), text),)


def apply_edits(text: str, groups: Iterable[tuple[Edit, ...]]) -> tuple[str, list[tuple[Edit, ...]]]:
    """Return the text after the edits, and the groups that were applied: those that overlap no earlier one."""
    taken: dict[Edit, None] = {}
    applied = []
    for group in groups:
        new = [edit for edit in group if edit not in taken]
        if any(_overlap(edit, other) for edit in new for other in taken):
            continue
        taken.update(dict.fromkeys(new))
        applied.append(group)
    for edit in sorted(taken, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text, applied


def _overlap(one: Edit, other: Edit) -> bool:
    if one.start == one.end and other.start == other.end:
        return one.start == other.start
    return one.start < other.end and other.start < one.end
