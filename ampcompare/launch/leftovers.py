"""Remove files that a killed process left behind; the next command on their folder does it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["private_folder", "remove_leftovers", "remove_leftovers_of_cell"]

# The number in a name is the PID of the process that writes there.
LEFTOVER = re.compile(r"\..+\.(?P<writer>\d+)\.tmp|\.rendezvous\.(?P<agent>\d+)\..+")
CELLS = ("cells/*", "cells/*/node*", "verify-resume/*", "unbroken", "resumed")
MAX_AGE_SECONDS = 3600.0


@contextlib.contextmanager
def private_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder with an unpredictable name that no other user can read or write; remove it afterwards."""
    path = Path(tempfile.mkdtemp(prefix=f".rendezvous.{os.getpid()}.", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove from a run directory the temporary files of processes that have ended.

    In cells of Slurm and folders of nodes, whose processes may be on other machines, files stay for an hour.
    """
    _remove_from(folder)
    for cell in (cell for pattern in CELLS for cell in folder.glob(pattern)):
        remote = cell.name.startswith("node") or (cell / "job.json").exists()
        for path in (cell, cell / "checkpoints"):
            _remove_from(path, remote=remote)


def remove_leftovers_of_cell(folder: Path) -> None:
    """Remove from a cell the temporary files of an agent that was killed, and of its ranks."""
    _remove_from(folder)


def _remove_from(folder: Path, *, remote: bool = False) -> None:
    with contextlib.suppress(OSError):  # a file that cannot be removed costs space only
        for entry in os.scandir(folder):
            match = LEFTOVER.fullmatch(entry.name)
            if match is not None and _is_left(entry, match, remote=remote):
                _remove(entry)


def _is_left(entry: os.DirEntry[str], match: re.Match[str], *, remote: bool) -> bool:
    writer = match["writer"] or match["agent"]
    may_be_reused = match["writer"] and psutil.pid_exists(int(match["writer"]))  # another process may have this PID
    if remote or may_be_reused:
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > MAX_AGE_SECONDS
    return not psutil.pid_exists(int(writer))


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path, ignore_errors=True)
    else:
        Path(entry.path).unlink(missing_ok=True)
