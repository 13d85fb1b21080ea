"""The parent's side of the process server: requests, answers, and clean-up when it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import IO, Any

import psutil

from ampcompare.base.errors import LaunchError
from ampcompare.base.isolate.start import start_command

__all__ = ["ServerGone", "ServerProcess"]

POLL_SECONDS = 0.1
END_SECONDS = 5.0


class ServerGone(Exception):
    """The server has ended, and so has the cell that it forked, if any."""


class ServerProcess:
    """A server for requests, one at a time; it takes seconds to be ready. Another thread may close it at any time.

    Attributes:
        is_ready: whether it has loaded what cells need.
        cell: the process of the current cell, from its start to its end.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # In a new session, Ctrl-C in the terminal reaches only this process, which then ends the cell.
        self._process = subprocess.Popen(
            start_command("ampcompare.launch.forkserver"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.is_ready = False
        self.cell: psutil.Process | None = None
        self._unread = b""
        self._reading = threading.Lock()  # a pipe is not closed while another thread reads it
        self._is_closed = False

    @property
    def ended(self) -> bool:
        """Whether the server has ended; a cell that it forked may continue."""
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        """Return the end of a sentence about a server that has ended."""
        code = self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        cause = " (probably the out-of-memory killer)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{cause}"

    def answers(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a request and yield the answers, up to the exit of the cell; an empty one after each idle poll.

        Raises:
            ServerGone: no more answers can come.
            LaunchError: the server ended by itself before it was ready.
        """
        yield from self._until_ready()
        try:
            _pipe(self._process.stdin).write(json.dumps(request).encode() + b"\n")
            _pipe(self._process.stdin).flush()
        except (OSError, ValueError):  # the server has ended, or was closed
            raise ServerGone from None
        for message in self._messages():
            if message.get("event") == "begin":
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.cell = psutil.Process(message["pid"])
            if message.get("event") == "exit":
                self.cell = None  # before the yield: the caller may never resume this generator
            yield message
            if message.get("event") == "exit":
                return

    def _until_ready(self) -> Iterator[dict[str, Any]]:
        """Yield an empty message after each idle poll until the server is ready."""
        if self.is_ready:
            return
        try:
            for message in self._messages():
                if message.get("event") == "ready":
                    self.is_ready = True
                    return
                yield message
        except ServerGone:
            if self._is_closed or (code := self._process.wait()) < 0:
                raise
            errors = _pipe(self._process.stderr).read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise LaunchError(f"the process server ended with exit code {code}: {errors[-1]}") from None

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield messages, including those of a cell that outlives its server.

        Raises:
            ServerGone: no process is left that could send one.
        """
        while True:
            line, newline, unread = self._unread.partition(b"\n")
            if newline:
                self._unread = unread
                yield json.loads(line)
            elif (chunk := self._read()) is None:
                # Any process that the cell started keeps the pipe open.
                if self.ended and (self.cell is None or not _is_alive(self.cell)):
                    raise ServerGone
                if self.cell is not None or not self.is_ready:
                    yield {}
            elif chunk:
                self._unread += chunk
            else:
                raise ServerGone

    def _read(self) -> bytes | None:
        """Return what the server has written; None if it is idle, nothing at its end."""
        with self._reading:
            if self._is_closed:
                return b""
            channel = _pipe(self._process.stdout).fileno()
            return os.read(channel, 65536) if select.select([channel], [], [], POLL_SECONDS)[0] else None

    def close(self) -> None:
        """End the server and its cell."""
        with contextlib.suppress(BrokenPipeError):  # a write to a dead server is still buffered
            _pipe(self._process.stdin).close()  # the server ends its cell and itself
        if not self.is_ready and not self.ended:  # it would read the end of its input much later
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        if self.cell is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.cell.kill()
        with self._reading:
            self._is_closed = True
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                with contextlib.suppress(BrokenPipeError):
                    _pipe(pipe).close()


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not, even if its new parent never waits for it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
