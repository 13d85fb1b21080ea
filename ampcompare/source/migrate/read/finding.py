"""What `migrate` says about a line."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from difflib import SequenceMatcher

BY_HAND = "by hand"
NOTE = "note"
MARK = "# ampcompare migrate: "


@dataclass(frozen=True, order=True)
class Finding:
    """A remark on a line of the original.

    Attributes:
        line: from 1.
        column: from 0.
        kind: `BY_HAND` (the line is left as it is) or `NOTE` (rewritten, with a difference to know).
        message: what is the matter; behind a semicolon, what to do.
    """

    line: int
    column: int
    kind: str
    message: str

    @classmethod
    def of_node(cls, node: ast.AST, kind: str, message: str) -> Finding:
        """Return a remark on the line of a node."""
        return cls(node.lineno, node.col_offset, kind, message)  # type: ignore[attr-defined]


def without_advice(message: str) -> str:
    """Return what a message says is the matter, without what to do."""
    return message.partition("; ")[0]


class UnsureRewrite(Exception):
    """A use that cannot be rewritten surely.

    Attributes:
        node: where.
    """

    def __init__(self, node: ast.AST, message: str) -> None:
        super().__init__(message)
        self.node = node


def origins_of_lines(old_text: str, new_text: str) -> dict[int, int]:
    """Return for each line of a text the line of an earlier text that it comes from; both count from 1."""
    lines: dict[int, int] = {}
    matcher = SequenceMatcher(None, old_text.splitlines(), new_text.splitlines(), autojunk=False)
    for _, first, last, begin, end in matcher.get_opcodes():
        for number in range(begin, end):
            lines[number + 1] = min(first + number - begin, max(last - 1, first)) + 1
    return lines
