"""Marks in the output of several ranks that write into one pipe, so that its reader knows which rank wrote what.

A text of rank 1 is written between `\\x1e1\\x1f` and `\\x1d`, in one call of the system, which the pipe keeps together.
Nothing here imports torch.
"""

import os
import re
import sys
from collections.abc import Callable
from typing import Any

from ampcompare.base.environment.ranks import is_one_of_several_ranks, rank_in_process_group, rank_of_process
from ampcompare.base.environment.variables import CELL_FOLDER

MARKED = re.compile(rb"\x1e(\d+)\x1f([^\x1d]*)\x1d")
MAX_MARKED = 4096  # bytes that a pipe keeps together
PIECE = 1000  # characters of at most four bytes


def mark_output_with_rank() -> None:
    """Mark what this process and its forks print through Python while they are in a process group of several ranks."""
    if not os.environ.get(CELL_FOLDER) or isinstance(sys.stdout, _RankMarkedStream):
        return
    for fd, name in ((1, "stdout"), (2, "stderr")):
        is_read = _make_descriptor_unchanged_check(fd)
        stream, first = getattr(sys, name), getattr(sys, f"__{name}__")
        setattr(sys, name, _RankMarkedStream(stream, is_read))
        if first is not None:  # to which a script returns that has replaced the stream
            setattr(
                sys,
                f"__{name}__",
                getattr(sys, name) if first is stream else _RankMarkedStream(first, is_read),
            )


def _make_descriptor_unchanged_check(fd: int) -> Callable[[], bool]:
    """Return a function that says whether a file descriptor leads where it does now. A script may lead it elsewhere."""

    def where_descriptor_leads() -> tuple[int, int] | None:
        try:
            status = os.fstat(fd)
        except OSError:  # closed
            return None
        return status.st_dev, status.st_ino

    first = where_descriptor_leads()
    return lambda: where_descriptor_leads() == first


class _RankMarkedStream:
    """A stream of text, or of the bytes below one, that marks what is written to it while the cell reads that."""

    def __init__(self, stream: Any, is_read: Callable[[], bool]) -> None:
        self._stream = stream
        self._is_read = is_read

    @property
    def buffer(self) -> Any:
        """The stream of bytes, into which a script may write past the text, such as with an encoding of its own."""
        return _RankMarkedStream(self._stream.buffer, self._is_read)

    def write(self, text: Any) -> int:
        """Write a text, or bytes to the stream of bytes."""
        rank = _rank_in_group()
        if rank is None or not self._is_read():
            return int(self._stream.write(text))
        begin, end = f"\x1e{rank}\x1f", "\x1d"
        if isinstance(text, str):
            for at in range(0, len(text), PIECE):
                self._stream.write(begin + text[at : at + PIECE] + end)
            return len(text)
        data = bytes(text)
        for at in range(0, len(data), PIECE):
            self._stream.write(begin.encode() + data[at : at + PIECE] + end.encode())
        return len(data)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)


def _rank_in_group() -> int | None:
    """Return the rank of this process; None where it is the only one, or none of a group."""
    if (place := rank_in_process_group()) is not None:
        return place.rank if place.size > 1 else None
    return rank_of_process() if is_one_of_several_ranks() and os.environ.get("WORLD_SIZE") != "1" else None
