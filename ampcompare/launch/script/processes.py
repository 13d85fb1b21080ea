"""The process of a script's cell: forked from a server that has torch imported, or a new interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from ampcompare.base.environment.threads import THREAD_VARIABLES
from ampcompare.base.errors import EnvironmentUnfit
from ampcompare.base.isolate.start import start_command

__all__ = ["PYTHON", "CellProcess", "ScriptServer", "can_fork", "start_interpreter", "threads_of"]

PYTHON = (sys.executable, "-W", "ignore::FutureWarning", "-m")
START_SECONDS = 120.0
END_SECONDS = 5.0
POLL_SECONDS = 0.1


class CellProcess(Protocol):
    """A process whose output is read; it leads its own session.

    Attributes:
        stdout: its output and errors.
        returncode: None until `poll` or `wait` has seen its end; negative for a signal.
    """

    pid: int
    stdout: BinaryIO
    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""

    def wait(self) -> int:
        """Return the exit code when it ends."""


def can_fork(processes: int) -> bool:
    """Return whether a cell of so many processes can be forked from a server: torchrun starts interpreters."""
    return processes == 1 and hasattr(os, "fork") and hasattr(socket, "send_fds")


class _Supervised(subprocess.Popen[bytes]):
    """A command that ends with this process, which holds its standard input open."""

    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        assert self.stdin is not None
        self.stdin.close()
        return code


def start_interpreter(command: Sequence[str], environment: Mapping[str, str]) -> CellProcess:
    """Start a command line.

    Raises:
        EnvironmentUnfit: the system cannot.
    """
    try:
        return _Supervised(  # type: ignore[return-value]
            start_command("ampcompare.launch.script.supervise", *command),
            stdin=subprocess.PIPE,  # the command itself gets an end of file
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentUnfit(f"the process of a script cannot be started: {error}") from None


class ScriptServer:
    """A server for cells, one at a time; they end with this process. Another thread may close it at any time.

    Args:
        environment: of the server; libraries read their number of threads once.

    Attributes:
        was_killed: whether a signal ended it before it had started a cell, so that another one can be tried.

    Raises:
        EnvironmentUnfit: it cannot be started.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.threads = threads_of(environment)
        self.was_killed = False
        self._is_ready = False
        self._reading = threading.Lock()  # the channel is not closed while another thread reads it
        self._channel, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*PYTHON, "ampcompare.script.server", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                    env=_independent_of_folder(environment),
                    cwd=os.sep,  # `-m` looks here first: a file `ampcompare.py` next to a script is not this package
                    start_new_session=True,
                )
            except OSError as error:
                raise EnvironmentUnfit(f"the process of a script cannot be started: {error}") from None

    def wait_until_ready(self, is_asked: Callable[[], bool]) -> bool:
        """Wait until cells can be started; return False if they are asked to stop before.

        Raises:
            EnvironmentUnfit: the server has ended before, or takes too long.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready and not self._can_read(POLL_SECONDS) and time.monotonic() < deadline:
            if is_asked():
                return False
        if not self._is_ready and not self._answer(0.0):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.was_killed = self._process.wait(END_SECONDS) < 0
            self._process.kill()
            assert self._process.stderr is not None
            lines = self._process.stderr.read().decode(errors="replace").strip().splitlines() or ["no message"]
            self.close()
            raise EnvironmentUnfit(f"the server of a script's cells did not start: {lines[-1]}")
        self._is_ready = True
        return True

    @property
    def runs(self) -> bool:
        """Whether the server can take another cell."""
        return self._process.poll() is None

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> CellProcess:
        """Fork a cell that runs `ampcompare` with these words.

        Raises:
            EnvironmentUnfit: the server has ended.
        """
        request = {"words": list(words), "folder": str(Path.cwd()), "environment": dict(environment)}
        mine, theirs = os.pipe()
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode() + b"\n"], [theirs])
        except OSError as error:
            self.was_killed = True
            os.close(mine)
            raise EnvironmentUnfit(f"the server of a script's cells has ended: {error}") from None
        finally:
            os.close(theirs)
        answer = self._answer(START_SECONDS)
        if answer is None:
            self.was_killed = True
            os.close(mine)
            raise EnvironmentUnfit("the server of a script's cells has ended")
        return _Forked(self, answer["pid"], os.fdopen(mine, "rb"))

    def code(self, timeout: float | None) -> int | None:
        """Return the exit code of the cell; None if it has not ended in time."""
        if timeout is not None and not self._can_read(timeout):
            return None
        answer = self._answer(None)
        return -signal.SIGKILL if answer is None else answer["code"]

    def _can_read(self, timeout: float) -> bool:
        with self._reading:
            return self._channel.fileno() < 0 or bool(select.select([self._channel], [], [], timeout)[0])

    def _answer(self, timeout: float | None) -> dict[str, int] | None:
        if timeout is not None and not self._can_read(timeout):
            return None
        line = b""
        with self._reading, contextlib.suppress(OSError):
            while byte := self._channel.recv(1):  # not ahead: `select` sees what is left
                line += byte
                if byte == b"\n":
                    return dict(json.loads(line))
        return None

    def close(self) -> None:
        """End the server and its cell."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # ends a read of another thread
        with self._reading:
            self._channel.close()
        if not self._is_ready:  # it would read the end of the channel much later
            self._process.kill()
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def _independent_of_folder(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose search path for modules means the same in another working directory."""
    path = environment.get("PYTHONPATH")
    if not path:
        return dict(environment)
    return {**environment, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))}


class _Forked:
    """A cell of the server."""

    def __init__(self, server: ScriptServer, pid: int, stdout: BinaryIO) -> None:
        self._server = server
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.code(0.0)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._server.code(None)
        assert self.returncode is not None
        return self.returncode


def threads_of(environment: Mapping[str, str]) -> tuple[str | None, ...]:
    """Return what the libraries below torch read of an environment when they are loaded."""
    return tuple(environment.get(name) for name in THREAD_VARIABLES)
