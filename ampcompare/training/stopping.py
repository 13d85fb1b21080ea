"""A run that is told to end by SIGTERM, as Slurm does before it takes a machine away, ends at its next drain point."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

__all__ = ["StopRequest", "stopped_by_sigterm"]


class StopRequest:
    """Whether somebody has asked for the end of a run.

    Args:
        step: end as if asked at the first drain point at or after so many updates.
    """

    def __init__(self, step: int | None = None) -> None:
        self.asked = False
        self.step = step

    def holds(self, before: int, after: int) -> bool:
        """Tell whether to stop after the updates from `before` up to `after`."""
        return self.asked or (self.step is not None and before < self.step <= after)


@contextlib.contextmanager
def stopped_by_sigterm(stop: StopRequest) -> Iterator[None]:
    """Let SIGTERM ask for the end, as often as it comes; only the main thread of a process can, others train on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: object) -> None:
        stop.asked = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
