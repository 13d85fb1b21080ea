"""The process that a launcher works with, which one thread starts and any other may stop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["LauncherClosed", "Stoppable"]

Process = TypeVar("Process")


class LauncherClosed(Exception):
    """The launcher was closed by another thread, which wants no record of the cell."""


class Stoppable(Generic[Process]):
    """At most one process at a time, and none once this is closed.

    Args:
        end: ends the process, and returns when it has ended.

    Attributes:
        process: that runs, or was the last to run and was not dropped.
        is_asked: whether the cell that the launcher works on was asked to stop.
    """

    def __init__(self, end: Callable[[Process], None]) -> None:
        self.process: Process | None = None
        self.is_asked = False
        self._end = end
        self._lock = threading.Lock()  # held for as long as a process takes to start, not to be ready
        self._is_busy = False
        self._is_closed = False

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Hold while the launcher works on a cell."""
        self.is_asked = False
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def ask(self) -> bool:
        """Ask the cell to stop, whether or not its process has started; return False if there is none."""
        self.is_asked = self._is_busy
        return self._is_busy

    def start(self, make: Callable[[], Process]) -> Process:
        """Start a process.

        Raises:
            LauncherClosed: it is too late.
        """
        with self._lock:
            self.check()
            self.process = process = make()
            return process

    def check(self) -> None:
        """Check that the launcher still works.

        Raises:
            LauncherClosed: it was closed.
        """
        if self._is_closed:
            raise LauncherClosed

    def drop(self) -> None:
        """End the process; another one can start."""
        with self._lock:
            process, self.process = self.process, None
        if process is not None:
            self._end(process)

    def close(self) -> None:
        """End the process, and let no other one start."""
        with self._lock:
            self._is_closed = True
        self.drop()
