"""A process that has torch imported and forks once per cell, which starts a cell in milliseconds instead of seconds.

Started as `python -m ampcompare.launch.server`, so that a user's unguarded script or notebook is never imported again.
Requests come on standard input, one JSON object a line: `{"config": ..., "folder": ...}`. Answers on standard output:
`{"event": "ready"}`, `{"event": "begin", "pid": ...}`, `{"event": "progress", ...}` and
`{"event": "exit", "code": ..., "signal": ...}`.
The end of standard input ends the server and the cell that it runs. CUDA is not touched before the fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch

from ampcompare.config import RunConfig
from ampcompare.launch import worker
from ampcompare.launch.base import Progress, log_name, send_output_to
from ampcompare.tasks.catalog import BUILTIN_MODELS, TORCHVISION_FILES
from ampcompare.tasks.torchvision_loader import load_torchvision

__all__ = ["main"]

POLL_SECONDS = 0.02


def _say(channel: int, **message: Any) -> None:
    os.write(channel, (json.dumps(message) + "\n").encode())  # one write under 4 KiB: lines of two processes never mix


def _run(request: dict[str, Any], channel: int) -> NoReturn:
    """Be the cell: log to a file, train, leave without the clean-up of the parent's objects."""
    code = 1
    try:
        folder = Path(request["folder"])
        send_output_to(folder / log_name(0))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def report(progress: Progress) -> None:
            _say(channel, event="progress", steps=progress.steps, total=progress.total_steps, epoch=progress.epoch)

        worker.run_cell(RunConfig.model_validate(request["config"]), folder, report)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _preload(data: str, arch: str) -> None:
    """Import what the cell will need and many cells share; whatever fails here fails in the cell, which reports it."""
    with contextlib.suppress(Exception):
        if data == "digits":
            importlib.import_module("sklearn.datasets")
        if (
            data.startswith("imagefolder:")
            or data in TORCHVISION_FILES
            or (":" not in arch and arch not in BUILTIN_MODELS)
        ):
            load_torchvision()


def _serve(line: bytes, channel: int) -> bool:
    """Run one cell to its end; return whether the parent is still there."""
    request = json.loads(line)
    recipe = request["config"]["recipe"]
    _preload(recipe["data"]["name"], recipe["model"]["arch"])
    child = os.fork()
    if child == 0:
        _run(request, channel)
    _say(channel, event="begin", pid=child)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            _say(channel, event="exit", code=max(code, 0), signal=max(-code, 0))
            return True
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        if readable and not os.read(0, 1):  # nothing may come while a cell runs, but for the end of the parent
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False


def _import_what_optimizers_need() -> None:
    """Make a first optimizer, for which torch imports over a second's worth of modules, and 80 MiB of them.

    Each cell would do it again, and its peak of memory would hold them.
    """
    torch.optim.SGD([torch.zeros(1)], lr=1.0)


def main() -> int:
    """Serve requests until standard input ends."""
    _import_what_optimizers_need()
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*", category=DeprecationWarning)
    # Slurm sends it to all processes of a step: the cell saves and ends, and this one ends with its standard input.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = os.dup(1)
    os.dup2(2, 1)
    _say(channel, event="ready", seconds=time.process_time())
    buffer = b""
    while True:
        chunk = os.read(0, 65536)
        if not chunk:
            return 0
        buffer += chunk
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            if not _serve(line, channel):
                return 0


if __name__ == "__main__":
    sys.exit(main())
