"""Cells as tasks of Ray, on this machine or on a cluster: Ray places them, retries them and keeps their logs.

A task trains its cell as the command of a cell does. Where it sees the run directory, it works there; else it works in
a folder of its own machine, whose files come back when it ends.
"""

import contextlib
import importlib.util
import os
import socket
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ampcompare.base.environment.gpus import visible_gpus
from ampcompare.base.errors import BackendUnavailable, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.formatting import first_line_of_text
from ampcompare.base.secrets.masking import note_secrets_by_placeholder, secrets_by_placeholder
from ampcompare.experiment.launch.cell_files import (
    read_config,
    write_cell_inputs,
    write_config,
    write_record,
)
from ampcompare.experiment.launch.contract import record_of_failed_cell, record_of_interrupted_cell
from ampcompare.experiment.launch.dispatch.cell import train_unfinished_cell
from ampcompare.experiment.launch.dispatch.local import LocalLauncher
from ampcompare.experiment.launch.dispatch.queue_launcher import QueueLauncher
from ampcompare.experiment.launch.places import ANYWHERE, Place, places_for_cells
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.settings.config import RunConfig

POLL_SECONDS = 0.5
END_SECONDS = 10.0
MAX_RETRIES = 3  # of a task whose machine or worker was lost


def require_ray() -> None:
    """Check that Ray is installed; it is not imported."""
    if importlib.util.find_spec("ray") is None:
        raise BackendUnavailable("--launcher ray needs Ray: pip install ray (the extra ray)")


class RayLauncher(QueueLauncher):
    """Submits a task per cell, all announced cells ahead, and waits for each.

    It joins the cluster that RAY_ADDRESS names, or the one that `ray start` started last on this machine; else it
    starts Ray here, and ends it. Tasks end with this process.
    """

    def __init__(self) -> None:
        require_ray()
        _enable_ray_token()
        import ray

        self._ray: Any = ray
        self._tasks: dict[Path, Any] = {}
        self._terminated = False
        self._announced = 0
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                self._join_or_start_ray()
            except Exception as error:  # of no class of its own where Ray does not start in time
                why = first_line_of_text(error, type(error).__name__)
                raise LaunchError(f"Ray cannot be reached or started: {why}") from None

    def _join_or_start_ray(self) -> None:
        # Not address="auto", by which Ray joins any cluster of the machine: also the one of another command, which
        # ends with that command.
        options = {"log_to_driver": False, "include_dashboard": False, "configure_logging": False}
        try:
            self._ray.init(**options)
        except ConnectionError:  # the cluster that `ray start` started here is gone
            if os.environ.get("RAY_ADDRESS"):
                raise
            self._ray.init(address="local", **options)

    def submit_cells_ahead(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:
        for config, folder in cells:
            folder = folder.resolve()
            if folder not in self._tasks:
                needs = _resources_of_cell(config)
                self._refuse_unavailable_resources(needs)
                write_cell_inputs(config, folder)
                task = self._ray.remote(**needs)(train_cell_and_read_files_in_ray_task)
                self._tasks[folder] = task.remote(
                    config.model_dump_json(), str(folder), secrets_by_placeholder()
                )
                self._announced += 1

    def _refuse_unavailable_resources(self, needs: dict[str, Any]) -> None:
        """Refuse what no machine of Ray has now, for which it would wait without end."""
        there = self._ray.cluster_resources()
        for name, word in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
            if needs[word] > (found := there.get(name, 0)):
                text = f"a cell needs {needs[word]} {name}s (processes, threads and loaders), and Ray has {found:g}"
                if self._is_ours and not os.environ.get("RAY_ADDRESS"):
                    raise EnvironmentUnfit(text)
                self.report_note(f"{text} now; it waits for more")

    def wait_for_ended_cells(self, folders: Collection[Path]) -> set[Path]:
        try:
            ended = self._ray.wait([self._tasks[folder] for folder in folders], timeout=POLL_SECONDS)[0]
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            resumes = "the same command starts with the first cell that has no record"
            raise LaunchError(
                f"Ray is lost: {first_line_of_text(error, type(error).__name__)}; {resumes}"
            ) from None
        return {folder for folder in folders if self._tasks[folder] in ended}

    def take_record_of_ended_cell(self, config: RunConfig, folder: Path) -> RunRecord:
        task = self._tasks.pop(folder)
        try:
            _write_received_files(self._ray.get(task), folder)
            # Ray decides what runs next to a cell, so that none is known to have been alone.
            record = read_record(folder / CellFile.RECORD).model_copy(
                update={"jobs": max(1, self._announced)}
            )
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            record = record_of_failed_cell(config, f"the task of Ray was lost: {reason[-1]}")
            record = record_of_interrupted_cell(config) if self._terminated else record
        write_record(record, folder)
        return record

    def ask_cell_to_stop(self) -> bool:
        self._terminated = bool(self._tasks)
        for task in self._tasks.values():
            self._ray.cancel(task)
        return self._terminated

    def close(self) -> None:
        if self._ray.is_initialized():
            with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):  # it may be lost
                self._keep_ended_and_cancel_tasks()
            if self._is_ours:
                self._ray.shutdown()
        self._tasks.clear()

    def _keep_ended_and_cancel_tasks(self) -> None:
        """Keep what has ended since the last look, cancel the other tasks, and wait for them to end their cells."""
        for folder, task in self._tasks.items():
            with contextlib.suppress(self._ray.exceptions.RayError):
                if self._ray.wait([task], timeout=0)[0]:
                    _write_received_files(self._ray.get(task), folder)
        self.ask_cell_to_stop()
        if waiting := list(self._tasks.values()):
            self._ray.wait(waiting, num_returns=len(waiting), timeout=END_SECONDS)


def _resources_of_cell(config: RunConfig) -> dict[str, Any]:
    """Return what Ray reserves for a cell: a core for each thread and loader process, a GPU for each process."""
    on_gpu = config.device.startswith("cuda") or (
        config.device == "auto" and bool(places_for_cells([config], 2).all[0].gpus)
    )
    return {
        "num_cpus": config.processes * (config.threads + config.workers),
        "num_gpus": config.processes if on_gpu else 0,
        "max_retries": MAX_RETRIES,
        "max_calls": 1,
    }


def _write_received_files(files: dict[str, bytes], folder: Path) -> None:
    """Write the files of a cell, if they came back through the object store; `record.json` last."""
    for name in sorted(files, key=lambda name: name == CellFile.RECORD):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(files[name])


def _enable_ray_token() -> None:
    """Let Ray show its token where there is one: `ray start` asks for it by default then, and a client does not know.

    A cluster without tokens takes no notice. Must come before Ray is imported, which reads the variable once.
    """
    named = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if named or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def train_cell_and_read_files_in_ray_task(
    settings: str, folder: str, secrets_: dict[str, str]
) -> dict[str, bytes]:
    """Train a cell in processes of this machine; runs in a worker of Ray.

    Args:
        secrets_: of the arguments of a script, by their placeholders.

    Returns:
        The files of the cell by their path in the folder; none where the folder is shared.
    """
    note_secrets_by_placeholder(secrets_)
    config = RunConfig.model_validate_json(settings)
    with contextlib.ExitStack() as stack:
        path = Path(folder)
        try:
            is_shared = read_config(path).digest() == config.digest()
        except (OSError, ConfigError):
            is_shared = False
        if not is_shared:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ampcompare-ray-")))
            write_config(config, path)
        # Ray has set CUDA_VISIBLE_DEVICES; the record names these GPUs. What else runs on the machine is not known.
        place = (
            Place(tuple(visible_gpus()), shared=True) if _resources_of_cell(config)["num_gpus"] else ANYWHERE
        )
        where = ", ".join(filter(None, [f"node {socket.gethostname()}", str(place)]))
        train_unfinished_cell(path, stack.enter_context(LocalLauncher(place)), where)
        if is_shared:
            return {}
        files = [each for each in path.rglob("*") if each.is_file() and not each.is_symlink()]
        return {os.fspath(each.relative_to(path)): each.read_bytes() for each in files}
