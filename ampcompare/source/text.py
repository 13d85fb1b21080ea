"""The text of a module by lines, columns and nodes, as `ast` counts them."""

from __future__ import annotations

import ast
from bisect import bisect_right

from ampcompare.source.syntax import NEWLINE

__all__ = ["Text"]


class Text:
    """A text by lines and columns: lines from 1, columns in bytes of UTF-8.

    Attributes:
        text: the source.
        starts: where each line begins in it; the last one is empty where the text ends with a newline.
        newline: the first one of the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in NEWLINE.finditer(text))]
        first = NEWLINE.search(text)
        self.newline = first.group() if first else "\n"
        self._is_ascii = text.isascii()
        self._made: dict[ast.AST, str] = {}

    def line_start(self, line: int) -> int:
        """Return where a line begins; behind the last line, the end of the text."""
        return self.starts[line - 1] if line <= len(self.starts) else len(self.text)

    def line_text(self, line: int) -> str:
        """Return a line with its end."""
        return self.text[self.line_start(line) : self.line_start(line + 1)]

    def line_at(self, offset: int) -> int:
        """Return the line of a character."""
        return bisect_right(self.starts, offset)

    def offset(self, line: int, column: int) -> int:
        """Return the index in the text of a position."""
        start = self.line_start(line)
        if self._is_ascii:
            return start + column
        return start + len(self.line_text(line).encode("utf-8")[:column].decode("utf-8", "ignore"))

    def column(self, line: int, column: int) -> int:
        """Return a column in characters."""
        return self.offset(line, column) - self.line_start(line)

    def first_line(self, node: ast.AST) -> int:
        """Return the line where a node begins, decorators included."""
        decorators = getattr(node, "decorator_list", [])
        return decorators[0].lineno if decorators else node.lineno  # type: ignore[attr-defined,no-any-return]

    def start(self, node: ast.AST) -> int:
        """Return where a node begins; decorators are a part of what they decorate."""
        decorators = getattr(node, "decorator_list", [])
        if decorators:
            return self.offset(decorators[0].lineno, decorators[0].col_offset - 1)
        return self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        """Return where a node ends."""
        return self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends."""
        return self.start(node), self.end(node)

    def source(self, node: ast.AST) -> str:
        """Return the text of a node as it is written."""
        return self._made[node] if node in self._made else self.text[self.start(node) : self.end(node)]

    def make(self, text: str) -> ast.expr:
        """Return a new expression that stands nowhere in the text; `source` knows it."""
        node = ast.parse(text, mode="eval").body
        self._made[node] = text
        return node

    def indent(self, node: ast.AST) -> str:
        """Return the white space at the begin of the line of a node."""
        return self.line_indent(self.first_line(node))

    def line_indent(self, line: int) -> str:
        """Return the white space at the begin of a line."""
        text = self.line_text(line)
        return text[: len(text) - len(text.lstrip(" \t\f"))]

    def begins_line(self, node: ast.AST) -> bool:
        """Return whether nothing else stands before a node on its line."""
        return not self.text[self.line_start(self.first_line(node)) : self.start(node)].strip()

    def ends_line(self, node: ast.AST) -> bool:
        """Return whether nothing but a comment stands behind a node on its last line."""
        tail = self.text[self.end(node) : self.line_start(node.end_lineno + 1)].strip()  # type: ignore[attr-defined]
        return not tail or tail.startswith("#")

    def is_alone(self, statement: ast.stmt) -> bool:
        """Return whether a statement shares its lines with no other; a comment may follow it."""
        return self.begins_line(statement) and self.ends_line(statement)
