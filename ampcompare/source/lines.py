"""Where the lines of a source text begin, and where positions of `ast` are in it."""

from __future__ import annotations

import re

__all__ = ["NEWLINE", "SourceLines"]

NEWLINE = re.compile(r"\r\n|\r|\n")


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
