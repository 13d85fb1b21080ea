"""Parse source with Python's own parser, which says what is wrong and where; dotted names in its trees."""

from __future__ import annotations

import ast
import re
import sys
import warnings

__all__ = ["NEWLINE", "SourceInvalid", "SourceLines", "dotted", "parse_tree"]

# What Python's parser says of statements that Python 2 had.
PYTHON_2 = (
    "Missing parentheses in call to",
    "inconsistent use of tabs",
    "leading zeros in decimal integer literals",
    "multiple exception types must be parenthesized",
)
NEWLINE = re.compile(r"\r\n|\r|\n")


class SourceInvalid(ValueError):
    """A text that is not Python 3, in one line.

    Attributes:
        line: from 1, where the parser stopped; 0 where it does not say.
        kind: "not Python 3, but Python 2", or that this version of Python cannot parse it: its syntax may be newer.
    """

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        self.kind = "not Python 3, but Python 2" if message.startswith(PYTHON_2) else f"not Python {version}"


def parse_tree(text: str) -> ast.Module:
    """Return the syntax tree of a module.

    Raises:
        SourceInvalid: it is not Python 3, or nested too deeply.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d"
            return ast.parse(text)
    except SyntaxError as error:
        raise SourceInvalid(" ".join(error.msg.split()), error.lineno or 0) from None
    except (RecursionError, MemoryError):
        raise SourceInvalid("nested too deeply") from None
    except ValueError as error:  # such as a null byte
        raise SourceInvalid(str(error)) from None


def dotted(node: ast.AST | None) -> str | None:
    """Return `a.b.c` as text for a name or a chain of attributes; None for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


class SourceLines:
    """A text by lines and columns as `ast` counts them: lines from 1, columns in bytes of UTF-8.

    Attributes:
        text: the source.
        starts: where each line begins in it; the last one is empty where the text ends with a newline.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in NEWLINE.finditer(text))]
        self._is_ascii = text.isascii()

    def line_start(self, line: int) -> int:
        """Return where a line begins; behind the last line, the end of the text."""
        return self.starts[line - 1] if line <= len(self.starts) else len(self.text)

    def line_text(self, line: int) -> str:
        """Return a line with its end."""
        return self.text[self.line_start(line) : self.line_start(line + 1)]

    def offset(self, line: int, column: int) -> int:
        """Return the index in the text of a position."""
        start = self.line_start(line)
        if self._is_ascii:
            return start + column
        return start + len(self.line_text(line).encode("utf-8")[:column].decode("utf-8", "ignore"))
