"""Signals that ask a run to stop: it saves and ends at its next drain point.

Slurm sends SIGTERM before it takes a machine away, and a terminal that is closed sends SIGHUP.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from ampcompare.training.stop_request import StopRequest

__all__ = ["end_signals", "stopped_by_signal"]


def end_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to stop: SIGTERM, and SIGHUP unless this process ignores it (nohup)."""
    numbers = [signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


@contextlib.contextmanager
def stopped_by_signal(stop: StopRequest) -> Iterator[None]:
    """Let `end_signals` set `stop.asked`; only in the main thread, as no other can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: object) -> None:
        stop.asked = True

    before = [(number, signal.signal(number, ask)) for number in end_signals()]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
