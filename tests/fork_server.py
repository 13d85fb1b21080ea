"""Stands for `python`: forks itself for each request, so that a script that uses torch starts in milliseconds.

One process for a run of the tests loads torch and ampcompare once, and hides them (`hidden_modules.py`). It forks a
server for each process of pytest that connects, and ends with the last of them. A server forks a process for each
request of its pytest, and of these processes, and ends when its pytest does.

A request ends as an interpreter does: exit handlers run, threads are joined, an uncaught exception is printed, files
are flushed. Only its modules are not cleared, since that takes longer than most requests: each memory page that it
shares with the server would be copied.

A request is JSON with `words` (the command line), `folder`, `environment`, `session` (whether to begin one), `starter`
(the process that asks, whose mounts it sees) and `passed` (numbers of further files), and file descriptors: for
standard input, output and error, for the files that are passed, and for the answer, which is the process id, then the
exit code.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import runpy
import select
import socket
import sys
import warnings
from typing import Any

from forked_process import fork_from
from hidden_modules import hide_torch

MIN_FILE = 512  # above the numbers of files that a request passes on
exit_code: int | None = None  # of a request that ends
# What a request has defined, and nobody frees: a DistributedDataParallel then joins gloo's thread with the lock of the
# interpreter, for which that thread may wait.
defined: dict[str, Any] = {}


def end_quickly() -> None:
    """Flush what this process has opened, and end without clearing modules; the last exit handler."""
    if exit_code is not None:
        for file in (sys.stdout, sys.stderr, *gc.get_objects()):
            if issubclass(type(file), io.IOBase):
                with contextlib.suppress(ValueError, OSError):  # it is closed, or nobody reads it
                    file.flush()
        os._exit(exit_code)


def run(name: str, *, is_module: bool) -> None:
    """Run a module or file as the main program, and note the exit code."""
    global exit_code, defined
    try:
        if is_module:
            defined = runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            defined = runpy.run_path(name, run_name="__main__")
        exit_code = 0
    except SystemExit as exit:
        exit_code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        raise
    except BaseException:
        exit_code = 1
        raise


def serve(listening: socket.socket) -> socket.socket:
    """Fork a server for each process of pytest, and return the connection there; end with the last of them."""
    gc.collect()
    gc.freeze()
    servers: set[int] = set()
    while True:
        ready, _, _ = select.select([listening, *servers], [], [])
        for server in servers.intersection(ready):
            os.waitid(os.P_PIDFD, server, os.WEXITED)
            os.close(server)
            servers.remove(server)
        if listening in ready:
            connection, _ = listening.accept()
            child = os.fork()
            if child == 0:
                listening.close()
                for server in servers:
                    os.close(server)
                os.setsid()
                return connection
            connection.close()
            servers.add(os.pidfd_open(child))
        elif not servers:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(listening.getsockname())
            if not select.select([listening], [], [], 0)[0]:  # nobody has connected meanwhile
                os._exit(0)


def wait_for_request(connection: socket.socket) -> dict[str, Any]:
    """Return a request in the process that is forked for it; in the server, never return."""
    inner, outer = socket.socketpair(type=socket.SOCK_SEQPACKET)
    outer = socket.socket(fileno=move_up(outer.detach()))
    answers: dict[int, int] = {}
    connection.send(str(os.getpid()).encode())
    while True:
        ready, _, _ = select.select([connection, inner, *answers], [], [])
        for child in answers.keys() & set(ready):
            ended = os.waitid(os.P_PIDFD, child, os.WEXITED)
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            with contextlib.suppress(BrokenPipeError):
                os.write(answers[child], f"{code}\n".encode())
            os.close(answers.pop(child))
            os.close(child)
        for channel in {connection, inner}.intersection(ready):
            line, (*files, answer), _, _ = receive(channel)
            pid = os.fork()
            if pid == 0:
                connection.close()
                inner.close()
                for number in (*answers, *answers.values()):
                    os.close(number)
                request: dict[str, Any] = json.loads(line)
                # Out of the way of the numbers that the files shall have.
                answer, *files = (move_up(file) for file in (answer, *files))
                for number, file in zip((0, 1, 2, *request["passed"]), files, strict=True):
                    os.dup2(file, number)
                    os.close(file)
                if request["session"]:
                    os.setsid()
                os.write(answer, f"{os.getpid()}\n".encode())
                os.close(answer)
                fork_from(outer)
                return request
            for file in files:
                os.close(file)
            answers[os.pidfd_open(pid)] = answer


def move_up(file: int) -> int:
    """Give a file a number that no request asks for."""
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, MIN_FILE)
    os.close(file)
    return moved


def receive(channel: socket.socket) -> tuple[bytes, list[int], int, Any]:
    """Return a request; end the server where pytest has ended."""
    line, files, flags, address = socket.recv_fds(channel, 1 << 20, 8)
    if not line:
        os._exit(0)
    return line, files, flags, address


def enter(request: dict[str, Any]) -> tuple[bool, str]:
    """Set the process up as the interpreter would, and return whether a module is asked for, and the name or file.

    Options of Python itself that are understood: -u and -W.
    """
    mounts = os.open(f"/proc/{request['starter']}/ns/mnt", os.O_RDONLY)
    if not os.path.samestat(os.fstat(mounts), os.stat("/proc/self/ns/mnt")):  # it is in a sandbox
        ctypes.CDLL(None).setns(mounts, 0)
    os.close(mounts)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    words = list(request["words"])
    filters = [word for word in os.environ.get("PYTHONWARNINGS", "").split(",") if word]
    if words[0] == "-u" or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if words[0] == "-u":
        del words[0]
    while words[0] == "-W":
        filters.append(words[1])
        del words[:2]
    sys.warnoptions[:] = filters
    for text in filters:
        action, _, category = text.partition("::")
        warnings.simplefilter(action, getattr(__import__("builtins"), category or "Warning"))  # type: ignore[arg-type]
    is_module = words[0] == "-m"
    if is_module:
        del words[0]
    sys.argv[:] = words
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in named if folder and folder not in sys.path]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))
    return is_module, words[0]


if __name__ == "__main__":
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # as in the process of the tests
    atexit.register(end_quickly)  # before any other handler, as they run from the last to the first
    hide_torch()
    # no code of a request
    del __file__, hide_torch, sys.modules["hidden_modules"], sys.modules["forked_process"]
    module_asked, asked = enter(wait_for_request(serve(socket.socket(fileno=int(sys.argv[1])))))
    run(asked, is_module=module_asked)
