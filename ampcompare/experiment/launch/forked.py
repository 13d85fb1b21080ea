"""One process per cell, forked from a server that has torch imported."""

import abc
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from ampcompare.base.environment.fingerprint import THREAD_VARIABLES
from ampcompare.base.environment.variables import PLACE
from ampcompare.base.errors import LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.processes.client import MAX_SERVERS, ForkedProcess, ProcessServer, ServerLost
from ampcompare.base.processes.start import environment_without_working_directory, exit_code_text
from ampcompare.experiment.launch.cell_files import (
    drop_cell_outputs_from_code,
    log_tail,
    make_cell_folder,
    make_forwarder_of_new_progress,
    sandbox_of_cell,
    write_config,
    write_record,
)
from ampcompare.experiment.launch.contract import (
    Launcher,
    Progress,
    StoppableProcess,
    record_of_failed_cell,
    record_of_interrupted_cell,
)
from ampcompare.experiment.launch.places import ANYWHERE, Place
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import Recipe
from ampcompare.tasks.catalog import TASKS, TORCHVISION_FILES

CELL = "ampcompare.experiment.launch.worker.cell"
POLL_SECONDS = 0.05
Process = TypeVar("Process")


def worker_environment(place: Place = ANYWHERE) -> dict[str, str]:
    """Return the environment of workers: one thread per pool unless set, as torchrun does, and the GPUs of a place."""
    environment = environment_without_working_directory()
    environment.pop(PLACE, None)  # of a cell in which this command runs
    environment.update(place.environment)
    for variable in THREAD_VARIABLES:
        environment.setdefault(variable, "1")
    return environment


class AskedToStopBeforeStart(Exception):
    """The cell was asked to stop before its process had started."""


class StoppableLauncher(Launcher, Generic[Process]):
    """Starts a process for one cell at a time, which another thread may ask to stop, or end, at any moment."""

    def __init__(self, place: Place, end: Callable[[Process], None]) -> None:
        self._place = place
        self._process: StoppableProcess[Process] = StoppableProcess(end)

    def _is_asked_to_stop(self) -> bool:
        return self._process.is_asked or not self.may_start()

    @abc.abstractmethod
    def _ask_process_to_stop(self, process: Process) -> None:
        """Ask the process of the cell to save and stop."""

    def ask_cell_to_stop(self) -> bool:
        if not self._process.ask_to_stop():
            return False
        if (process := self._process.process) is not None:
            self._ask_process_to_stop(process)
        return True

    def end_cell(self) -> None:
        if self._process.ask_to_stop():
            self._process.end_process()

    def close(self) -> None:
        self._process.close()


class ForkServerLauncher(StoppableLauncher[ForkedProcess]):
    """Forks the processes of cells from a server, which is replaced where it is killed between two of them."""

    loaded: Sequence[str] = ()
    python_options: Sequence[str] = ()

    def __init__(self, place: Place = ANYWHERE) -> None:
        super().__init__(place, ForkedProcess.kill)
        self._server: StoppableProcess[ProcessServer] = StoppableProcess(ProcessServer.close)

    def _fork_cell_process(
        self, start: Callable[[ProcessServer], ForkedProcess], environment: Mapping[str, str] | None = None
    ) -> ForkedProcess:
        """Start the process of a cell by a server that is ready.

        Args:
            environment: of a server that must be started before; by default that of workers.

        Raises:
            AskedToStopBeforeStart: before there was one.
            LaunchError: no server can be started, or each of several was killed.
        """
        for _ in range(MAX_SERVERS):
            server = self._ensure_server(environment)
            try:
                if not server.wait_until_ready(self._is_asked_to_stop):
                    self._server.end_process()
                    raise AskedToStopBeforeStart
                return self._process.start(lambda server=server: start(server))  # type: ignore[misc]
            except ServerLost:
                self._process.raise_if_closed()
                how = server.exit_phrase()
                self._server.end_process()
            except LaunchError:
                self._server.end_process()
                raise
            self.report_note(f"the process server {how}; another one starts")
        raise LaunchError(f"{MAX_SERVERS} process servers ended, one after another; the last one {how}")

    def _ensure_server(self, environment: Mapping[str, str] | None = None) -> ProcessServer:
        server = self._server.process
        if server is not None and server.is_running:
            return server
        self._server.end_process()
        environment = worker_environment(self._place) if environment is None else environment
        with self._place.processes_kept_on_cores():
            return self._server.start(lambda: ProcessServer(self.loaded, environment, self.python_options))

    def close(self) -> None:
        super().close()
        self._server.close()


class ForkedLauncher(ForkServerLauncher):
    """Keeps one server for all cells. Cells end with the launcher, and with this process if it dies."""

    # by every cell
    loaded = (CELL, "ampcompare.guards.hooks", "ampcompare.backends.catalog:third_party_backends")

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        make_cell_folder(folder)
        write_config(config, folder)
        with self._process.busy_with_cell(), sandbox_of_cell(config, folder) as sandbox:
            environment = {**worker_environment(self._place), **sandbox.environment}
            code = self._run_cell(config, folder, environment, on_progress)
            self._process.raise_if_closed()
        path = folder / CellFile.RECORD
        if code == 0 and path.exists():
            return drop_cell_outputs_from_code(read_record(path), folder, sandbox.written)
        if self._is_asked_to_stop() and -code in (signal.SIGTERM, signal.SIGKILL):
            record = record_of_interrupted_cell(config)
        else:
            how, tail = exit_code_text(code) + (" and left no record" if code == 0 else ""), log_tail(folder)
            record = record_of_failed_cell(
                config, f"the process of the cell {how}" + (f": {tail}" if tail else "")
            )
        write_record(record, folder)
        return record

    def _run_cell(
        self,
        config: RunConfig,
        folder: Path,
        environment: Mapping[str, str],
        on_progress: Callable[[Progress], None] | None,
    ) -> int:
        """Return the exit code of the cell."""
        read = make_forwarder_of_new_progress(folder, on_progress)
        words, load = [str(folder.resolve())], _modules_to_import_before_fork(config.recipe)
        with (folder / CellFile.LOG).open("wb") as log:
            options: dict[str, Any] = {"output": log.fileno(), "environment": environment, "load": load}
            try:
                cell = self._fork_cell_process(
                    lambda server: server.start_fork(f"{CELL}:train_cell_in_fork", words, **options)
                )
            except AskedToStopBeforeStart:
                return -signal.SIGTERM
        if self._is_asked_to_stop():
            self._ask_process_to_stop(cell)
        while (code := cell.poll(POLL_SECONDS)) is None:
            read()
        read()
        self._process.end_process()  # of a server that was killed
        return code

    def _ask_process_to_stop(self, process: ForkedProcess) -> None:
        process.send_signal(signal.SIGTERM)


def _modules_to_import_before_fork(recipe: Recipe) -> list[str]:
    """Return what a cell needs and later cells share."""
    data, arch = recipe.data.name, recipe.model.arch
    names = [TASKS[recipe.task].implementation.partition(":")[0]] if recipe.task in TASKS else []
    if data == "digits":
        names.append("sklearn.datasets")
    is_of_torchvision = ":" not in arch and not any(arch in spec.models for spec in TASKS.values())
    if data.startswith("imagefolder:") or data in TORCHVISION_FILES or is_of_torchvision:
        names.append("ampcompare.tasks.torchvision_loader:load_torchvision")
    return names
