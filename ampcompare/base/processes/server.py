"""A process that has torch loaded and forks another one for each request, which so starts in milliseconds.

`python start.py -m ampcompare.base.processes.server CHANNEL LOAD...`, with the number of a socket to `client.py`: a
program of its own, so that a user's unguarded script or notebook is never imported again. It loads what is named,
`module` or `module:function` to call. It starts no thread, and does not touch CUDA. The end of the channel ends it.

A request is a line of JSON and a file, which gets the output of the fork. The fork leads a session, reads an empty
standard input, and calls a function:

- `function`, as `module:function`, and `words`, its argument
- `folder`, its working directory, and `environment`, null for that of the server
- `load`, which this fork needs and later ones share

The answers are lines of JSON, each with an `event`: `ready`, once; `begin`, with the `pid` of the fork, which now
heeds signals; `exit`, with `pid`, and `code`, which is negative for a signal.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

from ampcompare.base.processes.child import end_process_at_hangup_in_block
from ampcompare.base.processes.overlay import enter_sandbox_if_asked
from ampcompare.base.processes.start import add_working_directory_first, kill_with_descendants

POLL_SECONDS = 0.02
MAX_REQUEST = 2**20


def main(number: int, names: list[str]) -> int:
    """Serve requests until the channel ends; in a fork, call the function and return its exit code."""
    # Slurm sends SIGTERM to all processes of a step: a fork saves and exits, and the server exits when its client does.
    restored: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    restored[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)  # ignored under nohup
    for stop in restored:
        signal.signal(stop, signal.SIG_IGN)
    channel = socket.socket(fileno=number)
    with end_process_at_hangup_in_block(number):
        _load_torch()
        for name in names:
            _import_module_or_call_function(name)
    gc.collect()
    gc.freeze()  # a collection in a fork does not copy the pages of what is there now
    _send_event(channel, "ready")
    while received := _receive_request_and_output(channel):
        request, output = received
        # the fork reports what cannot be loaded
        with end_process_at_hangup_in_block(number), contextlib.suppress(Exception):
            for name in request["load"]:
                _import_module_or_call_function(name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os.setsid()
            # before the client knows the PID: a signal that it sends is heeded
            for stop, handler in restored.items():
                signal.signal(stop, handler)
            _send_event(channel, "begin", pid=os.getpid())  # not by the server, which may be killed first
            return _run_request(request, output, channel)
        os.close(output)
        if not _report_fork_exit_and_is_client_there(child, channel):
            return 0
    return 0


def _load_torch() -> None:
    """Import torch, and create an optimizer: torch then imports modules for more than a second, 80 MiB of them.

    Otherwise each fork would import them again, and its peak memory would include them.
    """
    import torch

    torch.optim.SGD([torch.zeros(1)], lr=1.0)


def _import_module_or_call_function(name: str) -> None:
    """Import a module, or call a function of it without arguments."""
    if ":" in name:
        _function_named(name)()
    else:
        importlib.import_module(name)


def _function_named(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def _send_event(channel: socket.socket, event: str, **facts: Any) -> None:
    """Write a message in one piece; small ones of server and fork never mix."""
    channel.sendall((json.dumps({"event": event, **facts}) + "\n").encode())


def _receive_request_and_output(channel: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Return a request and the file for its output; None at the end of the channel."""
    line, files = b"", []
    while not line.endswith(b"\n"):
        try:
            block, more, _, _ = socket.recv_fds(channel, MAX_REQUEST, 1)
        except ConnectionError:  # its other end was closed with messages unread
            return None
        files += more
        if not block:
            return None
        line += block
    return json.loads(line), files[0]


def _report_fork_exit_and_is_client_there(child: int, channel: socket.socket) -> bool:
    """Report the exit of a fork; return False where the client is gone, after killing the fork."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            with contextlib.suppress(ConnectionError):
                _send_event(channel, "exit", pid=child, code=os.waitstatus_to_exitcode(status))
            return True
        if select.select([channel], [], [], POLL_SECONDS)[0] and _is_client_gone(channel):
            kill_with_descendants(child)
            with contextlib.suppress(ProcessLookupError):  # it may not lead a group yet
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False


def _is_client_gone(channel: socket.socket) -> bool:
    """Return whether the client is gone, which writes nothing while a fork runs."""
    try:
        return not channel.recv(1)
    except ConnectionError:
        return True


def _run_request(request: dict[str, Any], output: int, channel: socket.socket) -> int:
    """Call the function of a request in this fork, and return its exit code."""
    if request["environment"] is not None:
        os.environ.clear()
        os.environ.update(request["environment"])
    null = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, null), (1, output), (2, output)):
        os.dup2(file, number)
    os.close(null)
    os.close(output)
    os.chdir(request["folder"])
    enter_sandbox_if_asked()
    channel.close()
    name: str = request["function"]
    words: list[str] = request["words"]
    sys.argv[:] = [name.partition(":")[0].partition(".")[0], *words]
    add_working_directory_first()
    return int(_function_named(name)(words) or 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
