"""A lock so that one command at a time writes into a run directory; it ends with its process in any case."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from ampcompare.base.errors import ConfigError
from ampcompare.base.files.read import FileFault, read_json
from ampcompare.base.files.write import write_atomically
from ampcompare.base.secrets import hide
from ampcompare.experiment.run_folder import check_output_dir
from ampcompare.launch.base import Launcher
from ampcompare.launch.leftovers import remove_leftovers
from ampcompare.records.run import dump_json

__all__ = ["LOCK", "OWNER", "owned"]

LOCK = ".lock"
OWNER = ".owner.json"
POLL_SECONDS = 0.2
NAMING_SECONDS = 2.0  # an owner needs a moment to write its details
MAX_SHOWN = 300


@contextlib.contextmanager
def owned(
    folder: Path,
    launcher: Launcher,
    *,
    command: str = "",
    wait_seconds: float = 0.0,
    note: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Make the run directory and hold its lock; of processes that take part in one command, the main one does.

    The system releases the lock of a process that dies, so that a dead owner does not block others. Reading needs no
    lock.

    Args:
        launcher: of the cells, which knows whether this process is the main one.
        command: what to show to others that want the folder.
        wait_seconds: how long to wait for another owner to end.
        note: called with the owner that it waits for.

    Raises:
        ConfigError: the folder cannot be made or written, or another command holds it.
    """
    if not launcher.is_main:
        yield
        return
    check_output_dir(folder)
    lock = FileLock(folder.resolve() / LOCK)
    try:
        _acquire(lock, folder, wait_seconds, note)
    except OSError as error:
        raise ConfigError(
            f"the output folder {folder} cannot be locked: {error.strerror or error}; choose another --output-dir"
        ) from None
    try:
        remove_leftovers(folder)  # left by processes that have ended: no other process may write here now
        write_atomically(folder / OWNER, dump_json(_this_process(command)))
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / OWNER).unlink(missing_ok=True)
        lock.release()


def _acquire(lock: FileLock, folder: Path, wait_seconds: float, note: Callable[[str], None] | None) -> None:
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=0)
        return
    owner = _name_owner(folder)
    if wait_seconds > 0:
        if note is not None:
            note(f"{folder} is in use by {owner}; waiting for it to end")
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=-1 if wait_seconds == float("inf") else wait_seconds, poll_interval=POLL_SECONDS)
            return
        owner = _name_owner(folder)
    waited = f" after {wait_seconds:g} s" if wait_seconds > 0 else ""
    raise ConfigError(
        f"{folder} is in use{waited} by {owner}; wait for it to end (--wait does that), or choose another --output-dir"
    )


def _this_process(command: str) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": command or " ".join(hide(sys.argv)),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _name_owner(folder: Path) -> str:
    """Return who holds the folder, from the details that the owner wrote; a file left by an earlier, dead owner does
    not count."""
    end = time.monotonic() + NAMING_SECONDS
    while True:
        try:
            owner = read_json(folder / OWNER)
            pid, host = int(owner["pid"]), str(owner["host"])
            if host != socket.gethostname() or psutil.pid_exists(pid):
                said = f"process {pid} on {host}, since {owner['since']}: {owner['command']}"
                return said if len(said) <= MAX_SHOWN else f"{said[:MAX_SHOWN]}..."
        except (FileFault, KeyError, TypeError, ValueError, OverflowError):
            pass
        if time.monotonic() >= end:
            return "another command that left no details"
        time.sleep(POLL_SECONDS)
