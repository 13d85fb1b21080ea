"""End a process that was started in a session of its own, and all that it has started; end with the one that did."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil

from ampcompare.base.isolate.child import end_at_hangup

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
    """Let `end_at_hangup` hold in a block; needs POSIX."""
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    end_at_hangup(descriptor)
    yield
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
