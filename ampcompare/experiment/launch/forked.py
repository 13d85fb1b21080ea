"""One process per cell, forked from a server that has torch imported; a new interpreter where fork is missing."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from ampcompare.base.environment.threads import THREAD_VARIABLES
from ampcompare.base.errors import LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.isolate.start import isolated_environment, start_command
from ampcompare.experiment.launch.base import Launcher, Progress, failed_record, interrupted_record
from ampcompare.experiment.launch.cell_files import log_tail, make_cell_folder, write_config, write_record
from ampcompare.experiment.launch.places import ANYWHERE, VARIABLE, Place
from ampcompare.experiment.launch.stoppable import Stoppable
from ampcompare.runs.records.run import RunRecord, read_record
from ampcompare.runs.settings.config import RunConfig

__all__ = ["ForkedLauncher", "worker_environment"]

MAX_SERVERS = 5  # per cell: if each of them is killed, the next one would be too
POLL_SECONDS = 0.1
END_SECONDS = 5.0


def worker_environment(place: Place = ANYWHERE) -> dict[str, str]:
    """Return the environment of workers: one thread per pool unless set, as torchrun does, and the GPUs of a place."""
    environment = isolated_environment()
    environment.pop(VARIABLE, None)  # of a cell in which this command runs
    environment.update(place.environment)
    for variable in THREAD_VARIABLES:
        environment.setdefault(variable, "1")
    return environment


class ForkedLauncher(Launcher):
    """Keeps one server for all cells. Cells end with the launcher, and with this process if it dies.

    A cell continues when its server is killed; the next cell gets another server.

    Args:
        place: the GPUs and cores that cells use.
    """

    def __init__(self, place: Place = ANYWHERE) -> None:
        self._place = place
        self._server: Stoppable[_ServerProcess] = Stoppable(_ServerProcess.close)
        self._interpreter: Stoppable[psutil.Popen] = Stoppable(psutil.Popen.kill)

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        with self._server.busy():
            if hasattr(os, "fork"):
                code, killed_by = self._run(config, folder, on_progress)
            else:
                code, killed_by = self._run_interpreter(config, folder)
            self._server.check()
        path = folder / CellFile.RECORD
        if code == 0 and not killed_by and path.exists():
            return read_record(path)
        if self._is_asked() and killed_by == signal.SIGTERM:
            record = interrupted_record(config)
            write_record(record, folder)
            return record
        how = f"was killed by {signal.Signals(killed_by).name}" if killed_by else f"ended with exit code {code}"
        if code == 0 and not killed_by:
            how += " and left no record"
        if killed_by == signal.SIGKILL:
            how += " (probably the out-of-memory killer)"
        tail = log_tail(folder)
        record = failed_record(config, f"the process of the cell {how}" + (f": {tail}" if tail else ""))
        write_record(record, folder)
        return record

    def _run(self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None) -> tuple[int, int]:
        """Return exit code and signal of the cell, which runs again if it ended together with its server."""
        for _ in range(MAX_SERVERS):
            make_cell_folder(folder)
            server = self._ensure_server()
            try:
                return self._follow(server, config, folder, on_progress)
            except _ServerGone:
                self._server.check()
                how = server.how_it_ended()
                self._server.drop()
                if (folder / CellFile.RECORD).exists():
                    return 0, 0
                if self._is_asked():
                    return 0, signal.SIGTERM
            self.note(f"the process server {how}; another one starts, and {config.arm} starts again")
        return 0, signal.SIGKILL

    def _follow(
        self,
        server: _ServerProcess,
        config: RunConfig,
        folder: Path,
        on_progress: Callable[[Progress], None] | None,
    ) -> tuple[int, int]:
        request = {
            "config": config.model_dump(mode="json"),
            "folder": str(folder.resolve()),
            "working": str(Path.cwd()),  # of this process, which may have moved since the server started
        }
        orphaned = False
        for message in server.answers(request):
            if self._is_asked() and not server.is_ready:
                self._server.drop()
                return 0, signal.SIGTERM
            if self._is_asked() and message.get("event") == "begin":
                self._send_stop(server.cell)
            if message.get("event") == "progress" and on_progress is not None:
                on_progress(Progress(*message["values"]))
            elif message.get("event") == "exit":
                return message["code"], message["signal"]
            if server.ended and not orphaned:
                orphaned = True
                self.note(f"the process server {server.how_it_ended()}; {config.arm} continues without it")
        raise AssertionError("the last answer is the exit of the cell")

    def _run_interpreter(self, config: RunConfig, folder: Path) -> tuple[int, int]:
        make_cell_folder(folder)
        write_config(config, folder)
        with (folder / CellFile.LOG).open("wb") as log, self._place.pinned():
            command = start_command("ampcompare.experiment.launch.worker.cell", str(folder))
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            environment = worker_environment(self._place)
            process = self._interpreter.start(lambda: psutil.Popen(command, env=environment, **streams))
        if self._is_asked():
            self._send_stop(process)
        try:
            code = process.wait()
        finally:
            self._interpreter.drop()
        return max(code, 0), max(-code, 0)

    def _is_asked(self) -> bool:
        return self._server.is_asked or not self.may_start()

    def terminate(self) -> bool:
        if not self._server.ask():
            return False
        server = self._server.process
        self._send_stop(self._interpreter.process if server is None else server.cell)
        return True

    def _send_stop(self, cell: psutil.Process | None) -> None:
        if cell is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                cell.send_signal(signal.SIGTERM)

    def _ensure_server(self) -> _ServerProcess:
        with self._place.pinned():
            return self._server.process or self._server.start(lambda: _ServerProcess(worker_environment(self._place)))

    def close(self) -> None:
        self._interpreter.close()
        self._server.close()


class _ServerGone(Exception):
    """The server has ended, and so has the cell that it forked, if any."""


class _ServerProcess:
    """A server for requests, one at a time; it takes seconds to be ready. Another thread may close it at any time.

    Attributes:
        is_ready: whether it has loaded what cells need.
        cell: the process of the current cell, from its start to its end.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # In a new session, Ctrl-C in the terminal reaches only this process, which then ends the cell.
        self._process = subprocess.Popen(
            start_command("ampcompare.experiment.launch.forkserver"),
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
            raise _ServerGone from None
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
        except _ServerGone:
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
                    raise _ServerGone
                if self.cell is not None or not self.is_ready:
                    yield {}
            elif chunk:
                self._unread += chunk
            else:
                raise _ServerGone

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
