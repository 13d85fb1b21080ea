"""A process with torch imported that forks a cell of a script, which saves each cell the seconds of those imports.

The fork runs `ampcompare exec` as `python -m ampcompare` would, and ends as an interpreter does. The server starts no
thread and never touches CUDA.

A request is one line of JSON on the socket whose number is the first argument, `{"words", "folder", "environment"}`,
with the file that gets the output.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

from ampcompare.base.isolate.child import ended_by_hangup
from ampcompare.base.isolate.forks import follow_fork, send_event

with ended_by_hangup(int(sys.argv[1])) if __name__ == "__main__" else contextlib.nullcontext():
    import torch

__all__ = ["main"]

MAX_REQUEST = 2**20
PRELOADED = ("ampcompare.script.prepare", "ampcompare.cli.exec_command", "ampcompare.cli.group")


def main() -> None:
    """Serve requests until the socket ends; in a fork, run the cell."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    with ended_by_hangup(channel.fileno()):
        for name in PRELOADED:
            importlib.import_module(name)
        torch.optim.SGD([torch.zeros(1)], lr=1.0)  # torch imports modules for more than a second here
    gc.collect()
    gc.freeze()  # a collection in a fork does not copy the pages of what is there now
    send_event(channel.fileno(), "ready")
    while request := _receive(channel):
        begun, begins = os.pipe()
        child = os.fork()
        if child == 0:
            channel.close()
            os.close(begun)
            _become(*request, begins)
            return
        os.close(begins)
        os.read(begun, 1)  # until the cell can be stopped by a signal to its group
        os.close(begun)
        os.close(request[1])
        send_event(channel.fileno(), "begin", pid=child)
        if not follow_fork(child, channel.fileno(), channel.fileno(), _kill_cell):
            return


def _receive(channel: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Return a request and the file for its output; None at the end of the socket."""
    line, files = b"", []
    while not line.endswith(b"\n"):
        block, more, _, _ = socket.recv_fds(channel, MAX_REQUEST, 1)
        files += more
        if not block:
            return None
        line += block
    return json.loads(line), files[0]


def _become(request: dict[str, Any], output: int, begins: int) -> None:
    """Turn this fork into the process of a cell, and run it.

    Args:
        output: file for its output.
        begins: file that is closed when it leads its group and heeds signals.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.close(begins)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["ampcompare", *request["words"]]
    runpy.run_module("ampcompare", run_name="__main__")


def _kill_cell(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may not lead a group yet
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main()
