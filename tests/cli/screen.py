"""A terminal for tests: what a person sees after some output, and a pseudo-terminal to write it to."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios

CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """Follows carriage returns, line feeds, cursor up and erased lines; colors are dropped, anything else is refused.

    Attributes:
        lines: all lines from the start, also those that a terminal has scrolled away.
        row, column: of the cursor.
        wrapped: whether any line was longer than the terminal.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines = [""]
        self.row = self.column = 0
        self.wrapped = False

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip()

    def feed(self, text: str) -> Screen:
        for count, code, control, letters in CODE.findall(text):
            if control == "\r":
                self.column = 0
            elif control == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif letters:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + letters + line[self.column + len(letters) :]
                self.column += len(letters)
                self.wrapped |= self.column > self.width
            elif code == "A":
                self.row = max(0, self.row - int(count or 1))
            elif code == "K" and count == "2":
                self.lines[self.row] = ""
            else:
                assert code == "m", f"an unexpected code: {count}{code}"
        return self


def open_terminal(width: int, height: int = 24) -> tuple[int, int]:
    """Return the two ends of a new pseudo-terminal, first the one that a person would sit at."""
    here, there = os.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    return here, there
