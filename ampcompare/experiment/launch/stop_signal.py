"""Signals that ask a run to stop: it saves and ends at its next drain point.

Slurm sends SIGTERM before it takes a machine away, and a terminal that is closed sends SIGHUP.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from ampcompare.training.stop_request import StopRequest


def end_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to stop: SIGTERM, and SIGHUP unless this process ignores it (nohup)."""
    numbers = [signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


class _Ask:
    """A handler that asks a run to stop."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop

    def __call__(self, number: int, frame: object) -> None:
        self.stop.asked = True


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Let `end_signals` that come before `stopped_by_signal` ask that run to stop: while it loads torch and its data.

    Only in the main thread.
    """
    with stopped_by_signal(StopRequest()):
        yield


@contextlib.contextmanager
def stopped_by_signal(stop: StopRequest) -> Iterator[None]:
    """Let `end_signals` set `stop.asked`; only in the main thread, as no other can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ask = _Ask(stop)
    before = [(number, signal.signal(number, ask)) for number in end_signals()]
    if any(isinstance(handler, _Ask) and handler.stop.asked for _, handler in before):
        stop.asked = True
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextlib.contextmanager
def raised_later() -> Iterator[None]:
    """Let what the handlers of SIGINT and `end_signals` raise come out of this block at its end, not within it.

    The handlers themselves act at once. An import that an exception leaves in the middle cannot always be repeated:
    NumPy then refuses to be imported again, and nothing that needs it could be saved. A second signal is not held up.
    Only in the main thread, as no other handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: list[BaseException] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *end_signals())}

    def handle(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        assert callable(handler)
        try:
            handler(number, frame)
        except BaseException as error:
            if raised:
                raise
            raised.append(error)

    for number, handler in handlers.items():
        if callable(handler):  # else the system acts
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)
    if raised:
        raise raised[0]
