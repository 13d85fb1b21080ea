"""One process per cell, forked from a server that has torch imported; a new interpreter where fork is missing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ampcompare.base.environment.threads import THREAD_VARIABLES
from ampcompare.base.isolate.start import isolated_environment, start_command
from ampcompare.launch.base import Launcher, Progress, failed_record, interrupted_record
from ampcompare.launch.cell_files import log_tail, make_cell_folder, write_config, write_record
from ampcompare.launch.places import ANYWHERE, VARIABLE, Place
from ampcompare.launch.server_process import ServerGone, ServerProcess
from ampcompare.launch.stoppable import Stoppable
from ampcompare.records.run import RunRecord, read_record
from ampcompare.settings.config import RunConfig

__all__ = ["ForkedLauncher", "worker_environment"]

MAX_SERVERS = 5  # per cell: if each of them is killed, the next one would be too


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
        self._server: Stoppable[ServerProcess] = Stoppable(ServerProcess.close)
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
        path = folder / "record.json"
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
            except ServerGone:
                self._server.check()
                how = server.how_it_ended()
                self._server.drop()
                if (folder / "record.json").exists():
                    return 0, 0
                if self._is_asked():
                    return 0, signal.SIGTERM
            self.note(f"the process server {how}; another one starts, and {config.arm} starts again")
        return 0, signal.SIGKILL

    def _follow(
        self,
        server: ServerProcess,
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
        with (folder / "log.txt").open("wb") as log, self._place.pinned():
            command = start_command("ampcompare.launch.worker.cell", str(folder))
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

    def _ensure_server(self) -> ServerProcess:
        with self._place.pinned():
            return self._server.process or self._server.start(lambda: ServerProcess(worker_environment(self._place)))

    def close(self) -> None:
        self._interpreter.close()
        self._server.close()
