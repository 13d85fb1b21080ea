"""The lines at the bottom of a terminal that are drawn over: drawn with rich, which is imported only with this file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ampcompare.cli.progress_lines import Segment, Symbols

__all__ = ["Region"]


class _Console(Console):
    """Never hides the cursor: a command that is killed or stopped could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class _Guarded:
    """A stream whose terminal may be closed: that is reported instead of an error, in any thread."""

    def __init__(self, stream: TextIO, on_closed: Callable[[], None]) -> None:
        self._stream = stream
        self._on_closed = on_closed
        self.encoding = stream.encoding or "ascii"

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._on_closed()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._on_closed()

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()


class Region:
    """Draws lines over those that it drew before; lines that are printed stand above them.

    Args:
        stream: a terminal.
        on_closed: is called when it cannot be written any more.
    """

    def __init__(self, stream: TextIO, on_closed: Callable[[], None]) -> None:
        guarded = _Guarded(stream, on_closed)
        self._stream = stream
        self._console = _Console(file=guarded, force_terminal=True, highlight=False, markup=False, emoji=False)  # type: ignore[arg-type]
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self.symbols = Symbols.of(guarded.encoding)
        self._live.start()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows of the terminal, as they are now."""
        columns, rows = self._console.size
        try:
            real = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return columns, rows
        return min(columns, real.columns or columns), min(rows, real.lines or rows)

    def draw(self, lines: Sequence[Sequence[Segment]], above: str | None = None) -> None:
        """Draw lines instead of the last ones.

        Args:
            above: a line that stays.
        """
        texts = [Text.assemble(*line) for line in lines]
        self._live.update(Text("\n", no_wrap=True, overflow="crop").join(texts), refresh=above is None)
        if above is not None:
            self._console.print(Text(above), soft_wrap=True)

    def close(self) -> None:
        """Clear what is drawn."""
        self._live.stop()
