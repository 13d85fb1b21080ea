"""One process per cell, forked from a server that has torch imported."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ampcompare.base.environment.fingerprint import THREAD_VARIABLES
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.processes.client import MAX_SERVERS, ProcessServer, ServerLost
from ampcompare.base.processes.start import isolated_environment
from ampcompare.experiment.launch.cell_files import (
    log_tail,
    make_cell_folder,
    sandboxed_cell,
    without_written,
    write_config,
    write_record,
)
from ampcompare.experiment.launch.contract import Launcher, Progress, Stoppable, failed_record, interrupted_record
from ampcompare.experiment.launch.places import ANYWHERE, VARIABLE, Place
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import Recipe
from ampcompare.tasks.catalog import TASKS, TORCHVISION_FILES

__all__ = ["ForkedLauncher", "worker_environment"]

CELL = "ampcompare.experiment.launch.worker.cell"
LOADED = (CELL, "ampcompare.guards.hooks", "ampcompare.backends.catalog:third_party_backends")  # by every cell


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
        self._server: Stoppable[ProcessServer] = Stoppable(ProcessServer.close)

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        with self._server.busy(), sandboxed_cell(config, folder) as sandbox:
            environment = {**worker_environment(self._place), **sandbox.environment}
            code, killed_by = self._run(config, folder, environment, on_progress)
            self._server.check()
        path = folder / CellFile.RECORD
        if code == 0 and not killed_by and path.exists():
            return without_written(read_record(path), folder, sandbox.written)
        if self._is_asked() and killed_by in (signal.SIGTERM, signal.SIGKILL):
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

    def _run(
        self,
        config: RunConfig,
        folder: Path,
        environment: Mapping[str, str],
        on_progress: Callable[[Progress], None] | None,
    ) -> tuple[int, int]:
        """Return exit code and signal of the cell, which runs again if it ended together with its server."""
        for _ in range(MAX_SERVERS):
            make_cell_folder(folder)
            write_config(config, folder)
            server = self._ensure_server()
            try:
                return self._follow(server, config, folder, environment, on_progress)
            except ServerLost:
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
        server: ProcessServer,
        config: RunConfig,
        folder: Path,
        environment: Mapping[str, str],
        on_progress: Callable[[Progress], None] | None,
    ) -> tuple[int, int]:
        if not server.wait_until_ready(self._is_asked):
            self._server.drop()
            return 0, signal.SIGTERM
        words, load = [str(folder.resolve())], _libraries(config.recipe)
        with (folder / CellFile.LOG).open("wb") as log:
            options: dict[str, Any] = {"environment": environment, "load": load, "is_attached": True}
            cell = server.start(f"{CELL}:main", words, output=log.fileno(), **options)
        if self._is_asked():
            cell.send_signal(signal.SIGTERM)
        orphaned = False
        for values in cell.reports():
            if values is not None and on_progress is not None:
                on_progress(Progress(*values))
            if not server.runs and not orphaned:
                orphaned = True
                self.note(f"the process server {server.how_it_ended()}; {config.arm} continues without it")
        code = cell.returncode or 0
        return max(code, 0), max(-code, 0)

    def _is_asked(self) -> bool:
        return self._server.is_asked or not self.may_start()

    def terminate(self) -> bool:
        if not self._server.ask():
            return False
        self._send_stop(signal.SIGTERM)
        return True

    def end_cell(self) -> None:
        if self._server.ask():
            self._send_stop(signal.SIGKILL)

    def _send_stop(self, number: signal.Signals) -> None:
        server = self._server.process
        if server is not None and server.fork is not None:
            server.fork.send_signal(number)

    def _ensure_server(self) -> ProcessServer:
        with self._place.on_its_cores():
            return self._server.process or self._server.start(
                lambda: ProcessServer(LOADED, worker_environment(self._place))
            )

    def close(self) -> None:
        self._server.close()


def _libraries(recipe: Recipe) -> list[str]:
    """Return what a cell needs and later cells share."""
    data, arch = recipe.data.name, recipe.model.arch
    names = [TASKS[recipe.task].implementation.partition(":")[0]] if recipe.task in TASKS else []
    if data == "digits":
        names.append("sklearn.datasets")
    is_of_torchvision = ":" not in arch and not any(arch in spec.models for spec in TASKS.values())
    if data.startswith("imagefolder:") or data in TORCHVISION_FILES or is_of_torchvision:
        names.append("ampcompare.tasks.torchvision_loader:load_torchvision")
    return names
