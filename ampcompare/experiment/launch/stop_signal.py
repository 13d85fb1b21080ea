"""Signals that ask a run to stop: it saves and ends at its next drain point.

Slurm sends SIGTERM before it takes a machine away, and a terminal that is closed sends SIGHUP.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ampcompare.training.stop_request import StopRequest


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to stop: SIGTERM, and SIGHUP unless this process ignores it (nohup)."""
    numbers = [signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


@contextlib.contextmanager
def stop_signals_handled(handler: Callable[[int, Any], object]) -> Iterator[list[Any]]:
    """Call a handler at `stop_signals` in a block, and put the handlers before it in place again behind it.

    Only in the main thread. The block gets those handlers.
    """
    before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield list(before.values())
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class _StopHandler:
    """A handler that asks a run to stop."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop

    def __call__(self, number: int, frame: object) -> None:
        self.stop.asked = True


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """Let `stop_signals` that come before `request_stop_at_signals` ask that run to stop: while torch loads.

    Only in the main thread.
    """
    with request_stop_at_signals(StopRequest()):
        yield


@contextlib.contextmanager
def request_stop_at_signals(stop: StopRequest) -> Iterator[None]:
    """Let `stop_signals` set `stop.asked`; only in the main thread, as no other can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ask = _StopHandler(stop)
    with stop_signals_handled(ask) as before:
        if any(isinstance(handler, _StopHandler) and handler.stop.asked for handler in before):
            stop.asked = True
        yield
