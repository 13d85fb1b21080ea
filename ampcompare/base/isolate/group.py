"""End a process that was started in a session of its own, and all that it has started; end with the one that did."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator

import psutil

__all__ = ["ended_by_hangup", "kill_group"]


def kill_group(pid: int) -> None:
    """Kill a process and its group at once; without process groups, as on Windows, its children one by one.

    One that has ended already is no error.

    Args:
        pid: of the leader of the group.
    """
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in [*leader.children(recursive=True), leader]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def ended_by_hangup(descriptor: int) -> Iterator[None]:
    """Let the system end this process when the other end of a pipe or socket is closed, even during an import.

    No thread could: an import of a large library holds the interpreter for seconds. What the other end writes
    meanwhile ends this process as well.
    """
    import fcntl  # not on Windows

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([descriptor], [], [], 0.0)[0]:  # it was closed before
        os.kill(os.getpid(), signal.SIGKILL)
    yield
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
