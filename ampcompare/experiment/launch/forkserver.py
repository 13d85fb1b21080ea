"""A process with torch imported that forks once per cell, so that a cell starts in milliseconds instead of seconds.

It is a separate program, so that a user's unguarded script or notebook is never imported again.
Requests come on standard input, one JSON object per line: `{"config": ..., "folder": ..., "working": ...}`, with the
working directory of the cell. Answers go to standard output; a cell, which sends some itself, outlives a server that is
killed.
CUDA is not initialized before the fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ampcompare.base.files.run_files import CellFile
from ampcompare.base.isolate.child import ended_by_hangup
from ampcompare.base.isolate.forks import follow_fork, send_event

with ended_by_hangup(0) if __name__ == "__main__" else contextlib.nullcontext():
    import torch

    from ampcompare.experiment.launch.base import Progress
    from ampcompare.experiment.launch.cell_files import send_output_to
    from ampcompare.experiment.launch.stop_signal import end_signals
    from ampcompare.experiment.launch.worker.cell import run_cell
    from ampcompare.runs.settings.config import RunConfig
    from ampcompare.tasks.catalog import TASKS, TORCHVISION_FILES
    from ampcompare.tasks.torchvision_loader import load_torchvision

__all__ = ["main"]


def _run(request: dict[str, Any], channel: int, signals: Sequence[int]) -> NoReturn:
    """Run the cell in the forked child, then `os._exit`: the parent's objects must not be cleaned up here.

    Args:
        signals: ignored by the server, and restored for the cell.
    """
    code = 1
    try:
        for number in signals:  # before the parent knows the PID: a signal that it sends is not ignored
            signal.signal(number, signal.SIG_DFL)
        send_event(channel, "begin", pid=os.getpid())  # not sent by the server, which may be killed first
        folder = Path(request["folder"])
        os.chdir(request["working"])
        send_output_to(folder / CellFile.LOG)
        _exit_with_parent(os.dup(0))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)

        def report(progress: Progress) -> None:
            send_event(channel, "progress", values=progress)

        run_cell(RunConfig.model_validate(request["config"]), folder, report)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _preload(data: str, arch: str) -> None:
    """Import libraries that the cell needs and later cells share; the cell reports what cannot be imported."""
    with contextlib.suppress(Exception):
        if data == "digits":
            importlib.import_module("sklearn.datasets")
        if (
            data.startswith("imagefolder:")
            or data in TORCHVISION_FILES
            or (":" not in arch and not any(arch in spec.models for spec in TASKS.values()))
        ):
            load_torchvision()


def _exit_with_parent(pipe: int) -> None:
    """Exit when the other end of a pipe is closed: the cell may outlive its server, but not their parent."""
    poll = select.poll()
    poll.register(pipe, 0)

    def watch() -> None:
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _serve(line: bytes, channel: int, signals: Sequence[int]) -> bool:
    """Run one cell to its end; return whether the parent still runs."""
    request = json.loads(line)
    recipe = request["config"]["recipe"]
    with ended_by_hangup(0):
        _preload(recipe["data"]["name"], recipe["model"]["arch"])
    child = os.fork()
    if child == 0:
        _run(request, channel, signals)
    return follow_fork(child, 0, channel, lambda pid: os.kill(pid, signal.SIGKILL))


def _import_optimizers() -> None:
    """Create an optimizer once: torch then imports modules for more than a second, 80 MiB of them.

    Otherwise each cell would import them again, and its peak memory would include them.
    """
    torch.optim.SGD([torch.zeros(1)], lr=1.0)


def main() -> int:
    """Serve requests until standard input ends."""
    with ended_by_hangup(0):
        _import_optimizers()
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*", category=DeprecationWarning)
    # Slurm sends SIGTERM to all processes of a step: the cell saves and exits, and this one exits with its input.
    signals = end_signals()
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    channel = os.dup(1)
    os.dup2(2, 1)
    send_event(channel, "ready", seconds=time.process_time())
    buffer = b""
    while True:
        chunk = os.read(0, 65536)
        if not chunk:
            return 0
        buffer += chunk
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            if not _serve(line, channel, signals):
                return 0


if __name__ == "__main__":
    sys.exit(main())
