"""Processes that `server.py` forks, for launchers: one at a time, which any thread may stop."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from ampcompare.base.errors import LaunchError
from ampcompare.base.processes.start import (
    exit_code_text,
    kill_process_group,
    kill_with_descendants,
    module_command,
)

MAX_SERVERS = 5  # for one process: if each of them is killed, the next one would be too
POLL_SECONDS = 0.1
START_SECONDS = 600.0  # of a file system that is slow, too
END_SECONDS = 5.0


class ServerLost(Exception):
    """The server has ended, or another thread closed it."""


class ProcessServer:
    """A server, which takes seconds to be ready. It ends with this process, and another thread may close it.

    Args:
        names: what it loads: `module`, or `module:function` to call.
        environment, options: of Python, for the server and what it forks.

    Attributes:
        is_ready: whether it has loaded what its forks need.
        fork: the current process, from its begin to its end.
    """

    def __init__(
        self, names: Sequence[str], environment: Mapping[str, str], options: Sequence[str] = ()
    ) -> None:
        self.is_ready = False
        self.fork: ForkedProcess | None = None
        self._unread = b""
        self._is_closed = False
        self._reading = threading.Lock()  # the channel is not closed while another thread reads it
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would fill, and stop the server
        self._channel, theirs = socket.socketpair()
        with theirs:
            python, *start = module_command("ampcompare.base.processes.server", str(theirs.fileno()), *names)
            try:
                # In a new session, Ctrl-C in the terminal reaches only this process, which then ends the fork.
                self._process = subprocess.Popen(
                    [python, *options, *start],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                self._channel.close()
                self._errors.close()
                raise LaunchError(f"the process server cannot be started: {error}") from None
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the server runs."""
        return self._process.poll() is None

    def exit_phrase(self) -> str:
        """Return the end of a sentence about a server that has ended."""
        return exit_code_text(self._wait_for_exit_code())

    def wait_until_ready(self, is_asked: Callable[[], bool]) -> bool:
        """Wait until the server can fork; return False if asked to stop before.

        Raises:
            LaunchError: it ended with an error, or is not ready in time.
            ServerLost: it was killed, or closed by another thread.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self.is_ready:
            try:
                self.is_ready = self.next_message() is not None
            except ServerLost:
                if self._is_closed or (code := self._wait_for_exit_code()) < 0:
                    raise
                self._errors.seek(0)
                lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
                raise LaunchError(f"the process server ended with exit code {code}: {lines[-1]}") from None
            if not self.is_ready and is_asked():
                return False
            if not self.is_ready and time.monotonic() > deadline:
                raise LaunchError(f"the process server was not ready after {START_SECONDS:g} s")
        return True

    def start_fork(
        self,
        function: str,
        words: Sequence[str],
        *,
        output: int | None = None,
        environment: Mapping[str, str] | None = None,
        load: Sequence[str] = (),
    ) -> ForkedProcess:
        """Fork a process that calls `module:function` with `words`, in the working directory of this one.

        Its output and errors go to `output`, by default a pipe, `ForkedProcess.stdout`. What it is to `load` later ones
        share.

        Args:
            function: as `module:function`.
            words: its arguments.
            output: a file descriptor for what it prints; None for a pipe, `ForkedProcess.stdout`.
            environment: all its variables; None for those of the server.
            load: modules that are imported before, once for all later forks.

        Raises:
            ServerLost: the server has ended.
        """
        request = {
            "function": function,
            "words": list(words),
            "folder": str(Path.cwd()),  # it may not be that in which the server started
            "environment": None if environment is None else dict(environment),
            "load": list(load),
        }
        with contextlib.ExitStack() as stack:
            stdout = None
            if output is None:
                mine, output = os.pipe()
                stack.callback(os.close, output)
                stdout = os.fdopen(mine, "rb")
                stack.push(lambda kind, *_: stdout.close() if kind else None)
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode() + b"\n"], [output])
            except OSError:
                raise ServerLost from None
            deadline = time.monotonic() + START_SECONDS
            while (message := self.next_message()) is None:
                if time.monotonic() > deadline:
                    kill_process_group(self.pid)
                    raise ServerLost
            self.fork = fork = ForkedProcess(self, message["pid"], stdout)
            fork.note_end_from_message(message)
            return fork

    def next_message(self, seconds: float = POLL_SECONDS) -> dict[str, Any] | None:
        """Return the next message, or None if there is none in some seconds.

        Raises:
            ServerLost: the server has ended, or is closed.
        """
        while b"\n" not in self._unread:
            with self._reading:
                if self._channel.fileno() < 0:
                    raise ServerLost
                if select.select([self._channel], [], [], seconds)[0]:
                    try:
                        block = self._channel.recv(65536)
                    except ConnectionError:
                        block = b""
                    if not block:
                        raise ServerLost
                    self._unread += block
                    continue
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def close(self) -> None:
        """End the server and its fork."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # the server ends its fork and itself
        if not self.is_ready and self.is_running:  # on a system where that does not end it while it loads
            kill_process_group(self.pid)
        self._wait_for_exit_code()
        if self.fork is not None:
            self.fork.kill()
        with self._reading:
            self._channel.close()
            self._errors.close()

    def _wait_for_exit_code(self) -> int:
        """Return the exit code of the server, which is about to end; it is killed if it does not."""
        try:
            return self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            kill_process_group(self.pid)
            return self._process.wait()


class ForkedProcess:
    """A process of a server; it leads its own session.

    Args:
        server: that has forked it, and whose messages report its end.
        pid: of the process.
        stdout: what it writes, if that is piped here; else None.

    Attributes:
        returncode: as of `subprocess`: negative for a signal; None until its end was seen.
    """

    def __init__(self, server: ProcessServer, pid: int, stdout: BinaryIO | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._server = server
        self._process: psutil.Process | None = None  # not another one that has got the same PID
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(pid)

    def note_end_from_message(self, message: Mapping[str, Any]) -> None:
        """Note the end, if a message reports it."""
        if message["event"] == "exit":
            self.returncode = message["code"]
            self._server.fork = None

    def is_alive(self) -> bool:
        """Return whether the process runs; a zombie does not, even if its new parent never waits for it."""
        try:
            process = self._process
            return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def kill(self) -> None:
        """Kill the process with its group and descendants; if it has ended, what it has left of its group."""
        (kill_with_descendants if self.is_alive() else kill_process_group)(self.pid)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None:
                self._process.send_signal(number)

    def poll(self, seconds: float = 0.0) -> int | None:
        """Return the exit code, or None if the process has not ended in some seconds.

        It is of no use without its server, and counts as killed.
        """
        if self.returncode is None:
            try:
                message = self._server.next_message(seconds)
            except ServerLost:
                self.returncode = -signal.SIGKILL
            else:
                self.note_end_from_message(message or {"event": ""})
        return self.returncode

    def wait(self) -> int:
        """Return the exit code when the process ends."""
        while (code := self.poll(POLL_SECONDS)) is None:
            pass
        return code
