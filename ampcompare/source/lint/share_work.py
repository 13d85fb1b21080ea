"""Examine many files in several processes, where forking them is safe and worth it."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
# Below this a second process saves less than it costs.
WORTH_SHARING = 4_000_000  # bytes of files
AT_ONCE = 8  # files that a process gets together


def map_files(function: Callable[[Path], T], files: Sequence[Path]) -> Iterator[T]:
    """Yield what a function returns for each file, in the order of the files.

    Args:
        function: can be pickled, as can what it returns; it may be called for a file again, so it changes nothing.
        files: to be examined.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    done = 0
    if cores > 1 and _can_fork_safely() and sum(map(_size_of_file, files)) >= WORTH_SHARING:
        try:
            with ProcessPoolExecutor(
                cores, multiprocessing.get_context("fork"), initializer=_ignore_interrupts
            ) as pool:
                for result in pool.map(function, files, chunksize=AT_ONCE):
                    yield result
                    done += 1
        except BrokenProcessPool:  # such as one that was killed for its memory: the rest is examined here
            pass
    yield from map(function, files[done:])


def _can_fork_safely() -> bool:
    """Return whether a fork of this process cannot inherit a lock that a thread holds: torch has threads of its own."""
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for the results ends them


def _size_of_file(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
