"""One process per cell, forked from a server that has torch imported; started afresh where there is no fork."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ampcompare.config import RunConfig
from ampcompare.environment import THREAD_VARIABLES
from ampcompare.errors import LaunchError
from ampcompare.launch.base import (
    Launcher,
    Progress,
    failed_record,
    interrupted_record,
    log_tail,
    make_cell_folder,
    write_config,
    write_record,
)
from ampcompare.record import RunRecord, read_record

__all__ = ["ForkedLauncher", "worker_environment"]

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def worker_environment() -> dict[str, str]:
    """Return the environment of workers: one thread per pool unless set, as torchrun does; this package on the path."""
    environment = dict(os.environ)
    for variable in THREAD_VARIABLES:
        environment.setdefault(variable, "1")
    paths = [str(PACKAGE_ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


class ForkedLauncher(Launcher):
    """Keeps one server for all cells. Cells end with the launcher, and with this process if it dies."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._cell: int | None = None
        self._terminated = False

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        make_cell_folder(folder)
        run = self._run if hasattr(os, "fork") else self._run_fresh
        code, killed_by = run(config, folder, on_progress)
        path = folder / "record.json"
        if code == 0 and not killed_by and path.exists():
            return read_record(path)
        if self._terminated and killed_by == signal.SIGTERM:
            record = interrupted_record(config)
            write_record(record, folder)
            return record
        how = f"was killed by {signal.Signals(killed_by).name}" if killed_by else f"ended with exit code {code}"
        if code == 0 and not killed_by:
            how += " and left no record"
        if killed_by == signal.SIGKILL:
            how += " (out of memory, if nobody killed it)"
        tail = log_tail(folder)
        record = failed_record(config, f"the process of the cell {how}" + (f": {tail}" if tail else ""))
        write_record(record, folder)
        return record

    def _run(self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None) -> tuple[int, int]:
        server = self._started()
        request = json.dumps({"config": config.model_dump(mode="json"), "folder": str(folder.resolve())})
        try:
            _pipe(server.stdin).write(request.encode() + b"\n")
            _pipe(server.stdin).flush()
        except OSError:
            raise LaunchError(f"the process server is gone (exit code {server.poll()})") from None
        while True:
            message = self._answer(server)
            if message["event"] == "begin":
                self._cell = message["pid"]
            elif message["event"] == "progress" and on_progress is not None:
                on_progress(Progress(message["steps"], message["total"], message["epoch"]))
            elif message["event"] == "exit":
                self._cell = None
                return message["code"], message["signal"]

    def _run_fresh(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None
    ) -> tuple[int, int]:
        write_config(config, folder)
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ampcompare.launch.worker", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=worker_environment(),
            )
        self._cell = process.pid
        try:
            code = process.wait()
        finally:
            process.kill()
            self._cell = None
        return max(code, 0), max(-code, 0)

    def terminate(self) -> bool:
        cell = self._cell
        if cell is None:
            return False
        self._terminated = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(cell, signal.SIGTERM)
        return True

    def _started(self) -> subprocess.Popen[bytes]:
        if self._server is None:
            # A session of its own: Ctrl-C in the terminal reaches this process alone, which then ends the cell.
            self._server = subprocess.Popen(
                [sys.executable, "-m", "ampcompare.launch.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=worker_environment(),
                start_new_session=True,
            )
            self._answer(self._server)
        return self._server

    def _answer(self, server: subprocess.Popen[bytes]) -> dict[str, Any]:
        line = _pipe(server.stdout).readline()
        if not line:
            self._server = None
            errors = _pipe(server.stderr).read().decode(errors="replace").strip().splitlines() or ["no message"]
            code = server.wait()
            _close_pipes(server)
            raise LaunchError(f"the process server ended with exit code {code}: {errors[-1]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        server, self._server, self._cell = self._server, None, None
        if server is None:
            return
        with contextlib.suppress(BrokenPipeError):  # what could not be written to a dead server is still to be flushed
            _pipe(server.stdin).close()  # the server ends its cell and itself
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        _close_pipes(server)


def _close_pipes(server: subprocess.Popen[bytes]) -> None:
    for pipe in (server.stdin, server.stdout, server.stderr):
        with contextlib.suppress(BrokenPipeError):
            _pipe(pipe).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
