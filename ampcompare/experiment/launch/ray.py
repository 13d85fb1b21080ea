"""Cells as tasks of Ray, on this machine or on a cluster: Ray places them, retries them and keeps their logs.

A task trains its cell in processes of its own, as on a single machine. Where it sees the run directory, it works there;
else it works in a folder of its own machine, whose files come back through Ray's object store.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from ampcompare.base.environment.gpus import visible_gpus
from ampcompare.base.errors import BackendUnavailable, EnvironmentUnfit, LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.files.write import write_atomically
from ampcompare.base.secrets import known_placeholders, restore
from ampcompare.experiment.launch.base import Progress, QueueLauncher, failed_record, interrupted_record
from ampcompare.experiment.launch.cell_files import (
    make_cell_folder,
    progress_reader,
    progress_writer,
    write_record,
)
from ampcompare.experiment.launch.places import ANYWHERE, Place, find_places
from ampcompare.runs.records.run import RunRecord, read_record
from ampcompare.runs.settings.config import RunConfig

__all__ = ["RayLauncher", "require_ray"]

POLL_SECONDS = 0.5
END_SECONDS = 2.0
MAX_RETRIES = 3  # of a task whose machine or worker was lost
GCS = "gcs_server"  # the process of Ray that every cluster has once
RESUMES = "the same command starts with the first cell that has no record"
TOKEN = "driver.token"  # a file by which a task recognizes the folder


def require_ray() -> None:
    """Check that Ray is installed; it is not imported.

    Raises:
        BackendUnavailable: it is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise BackendUnavailable("--launcher ray needs Ray: pip install ray (the extra ray)")


class RayLauncher(QueueLauncher):
    """Submits a task per cell, all announced cells ahead, and waits for each.

    It joins the cluster that RAY_ADDRESS names, or the one that `ray start` started last on this machine; else it
    starts Ray here, and ends it. Tasks end with this process.

    Raises:
        BackendUnavailable: Ray is not installed.
        LaunchError: Ray cannot be reached or started.
    """

    def __init__(self) -> None:
        require_ray()
        _use_token()
        import ray

        self._ray: Any = ray
        self._tasks: dict[Path, Any] = {}
        self._terminated = False
        self._announced = 0
        self._board: Any = None
        self._head: psutil.Process | None = None
        self._processes: list[psutil.Process] = []  # of Ray that was started here; later ones end with these
        self._is_ours = not ray.is_initialized()
        self._is_cluster = not self._is_ours
        if self._is_ours:
            try:
                self._join_or_start()
            except Exception as error:  # of no class of its own where Ray does not start in time
                raise LaunchError(f"Ray cannot be reached or started: {_first_line(error)}") from None

    def _join_or_start(self) -> None:
        # Not address="auto", by which Ray joins any cluster of the machine: also the one of another command, which
        # ends with that command.
        options = {"log_to_driver": False, "include_dashboard": False, "configure_logging": False}
        try:
            self._ray.init(**options)
        except ConnectionError:  # the cluster that `ray start` started here is gone
            if os.environ.get("RAY_ADDRESS"):
                raise
            self._ray.init(address="local", **options)
        self._head = next((child for child in psutil.Process().children() if child.name() == GCS), None)
        self._is_cluster = self._head is None
        if not self._is_cluster:
            self._processes = psutil.Process().children(recursive=True)

    def submit_ahead(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:
        for config, folder in cells:
            folder = folder.resolve()
            if folder not in self._tasks:
                needs = _resources(config)
                self._check(needs)
                make_cell_folder(folder)
                (folder / CellFile.PROGRESS).unlink(missing_ok=True)
                token = secrets.token_hex(16)
                write_atomically(folder / TOKEN, token)
                task = self._ray.remote(**needs)(train)
                board = self._ensure_board()
                self._tasks[folder] = task.remote(
                    config.model_dump_json(), str(folder), token, known_placeholders(), board
                )
                self._announced += 1

    def _check(self, needs: dict[str, Any]) -> None:
        """Refuse what Ray on one machine would wait for without end; a cluster may grow, and gets a note.

        Raises:
            EnvironmentUnfit: a cell needs more cores or GPUs than there are.
        """
        there = self._ray.cluster_resources()
        for name, word, option in (("CPU", "num_cpus", "cores"), ("GPU", "num_gpus", "GPUs")):
            if needs[word] > there.get(name, 0):
                text = f"a cell needs {needs[word]} {option} (processes, threads and loader processes)"
                if not self._is_cluster:
                    raise EnvironmentUnfit(f"{text}, but Ray has {there.get(name, 0):g} on this machine")
                self.note(f"{text}, but the cluster has {there.get(name, 0):g} now; Ray waits for more")

    def _ensure_board(self) -> Any:
        """Return the actor by which tasks without the run directory report; None where all machines are this one."""
        if self._is_cluster and self._board is None:
            self._board = self._ray.remote(num_cpus=0, max_restarts=-1)(_Board).remote()
        return self._board

    def collect(
        self,
        cells: Sequence[tuple[RunConfig, Path]],
        on_place: Callable[[int, str], None] = lambda index, place: None,
        on_progress: Callable[[int, Progress], None] | None = None,
    ) -> Iterator[tuple[int, RunRecord]]:
        cells = [(config, folder.resolve()) for config, folder in cells]
        self.submit_ahead(cells)
        left = dict(enumerate(cells))
        readers = {}
        for index, (_, folder) in left.items():
            report = None if on_progress is None else functools.partial(on_progress, index)
            readers[index] = progress_reader(folder, report, functools.partial(on_place, index))
        answer: Any = None
        while left:
            if self._is_headless():
                raise LaunchError(f"Ray is lost: its {GCS} has ended; {RESUMES}")
            try:
                ended = self._ray.wait([self._tasks[folder] for _, folder in left.values()], timeout=POLL_SECONDS)[0]
                answer = self._read_board(answer)
            except (self._ray.exceptions.RayError, ConnectionError) as error:
                raise LaunchError(f"Ray is lost: {_first_line(error)}; {RESUMES}") from None
            for index, (config, folder) in list(left.items()):
                readers[index]()
                if self._tasks[folder] in ended:
                    del left[index]
                    yield index, self._result(config, folder)

    def _read_board(self, answer: Any) -> Any:
        """Write what tasks without the run directory have reported there, and ask again.

        Args:
            answer: to the last question; None before the first.
        """
        if self._board is None or (answer is not None and not self._ray.wait([answer], timeout=0)[0]):
            return answer
        with contextlib.suppress(self._ray.exceptions.RayError):  # its machine was lost, and it starts again
            for folder, text in (self._ray.get(answer) if answer is not None else {}).items():
                if Path(folder) in self._tasks:
                    write_atomically(Path(folder) / CellFile.PROGRESS, text)
        return self._board.take.remote()

    def _result(self, config: RunConfig, folder: Path) -> RunRecord:
        """Return the record of a cell whose task has ended."""
        task = self._tasks.pop(folder)
        try:
            files: dict[str, bytes] = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            (folder / TOKEN).unlink(missing_ok=True)
            reason = str(error).strip().splitlines() or [type(error).__name__]
            record = failed_record(config, f"the task of Ray was lost: {reason[-1]}")
            record = interrupted_record(config) if self._terminated else record
            write_record(record, folder)
            return record
        _receive(files, folder)
        # Ray decides what runs next to a cell, so that none is known to have been alone.
        record = read_record(folder / CellFile.RECORD).model_copy(update={"jobs": max(1, self._announced)})
        write_record(record, folder)
        return record

    def terminate(self) -> bool:
        self._terminated = bool(self._tasks)
        self._cancel()
        return self._terminated

    def _cancel(self) -> None:
        for task in self._tasks.values():
            self._ray.cancel(task)

    def _is_headless(self) -> bool:
        """Return whether the Ray that was started here has lost its head; a minute later Ray ends this process."""
        if self._head is None:
            return False
        try:
            return self._head.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def close(self) -> None:
        if self._ray.is_initialized():
            if self._is_headless():
                self._kill()
            else:
                with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):  # it may be lost
                    self._end_tasks()
            if self._is_ours:
                self._ray.shutdown()
            self._kill(END_SECONDS)
        for folder in self._tasks:
            (folder / TOKEN).unlink(missing_ok=True)
        self._tasks.clear()
        self._board = None  # it ends with its last handle

    def _kill(self, timeout: float = 0.0) -> None:
        """Kill what is left of the Ray that was started here after some seconds; without its head it stays minutes."""
        for process in psutil.wait_procs(self._processes, timeout=timeout)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in (*process.children(recursive=True), process):
                    each.kill()
        self._processes.clear()

    def _end_tasks(self) -> None:
        """Keep what has ended since the last look, cancel the other tasks, and wait for them to end their cells."""
        for folder, task in self._tasks.items():
            with contextlib.suppress(self._ray.exceptions.RayError):
                if self._ray.wait([task], timeout=0)[0]:
                    _receive(self._ray.get(task), folder)
        self._cancel()
        deadline = time.monotonic() + 10.0
        while self._tasks and time.monotonic() < deadline:
            waiting = list(self._tasks.values())
            if len(self._ray.wait(waiting, num_returns=len(waiting), timeout=1.0)[1]) == 0:
                break


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _resources(config: RunConfig) -> dict[str, Any]:
    """Return what Ray reserves for a cell: a core for each thread and loader process, a GPU for each process."""
    on_gpu = config.device.startswith("cuda") or (
        config.device == "auto" and bool(find_places([config], 2).all[0].gpus)
    )
    return {
        "num_cpus": config.processes * (config.threads + config.workers),
        "num_gpus": config.processes if on_gpu else 0,
        "max_retries": MAX_RETRIES,
        "max_calls": 1,
    }


def _receive(files: dict[str, bytes], folder: Path) -> None:
    """Write the files of a cell, if they came back through the object store; `record.json` last."""
    for name in sorted(files, key=lambda name: name == CellFile.RECORD):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(files[name])
    (folder / TOKEN).unlink(missing_ok=True)


class _Board:
    """An actor that keeps the latest progress of each cell whose task does not see the run directory."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def put(self, folder: str, text: str) -> None:
        """Keep the progress of a cell, as in its file, by its folder."""
        self._texts[folder] = text

    def take(self) -> dict[str, str]:
        """Return what was put since the last call."""
        texts, self._texts = self._texts, {}
        return texts


def _use_token() -> None:
    """Let Ray show its token where there is one: `ray start` asks for it by default then, and a client does not know.

    A cluster without tokens takes no notice. Must come before Ray is imported, which reads the variable once.
    """
    named = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if named or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def train(settings: str, folder: str, token: str, secrets_: dict[str, str], board: Any = None) -> dict[str, bytes]:
    """Train a cell in processes of this machine; runs in a worker of Ray.

    Args:
        settings: JSON of the configuration.
        folder: of the cell, on the machine that submitted it.
        token: that lies in the folder, if this is the same one.
        secrets_: of the arguments of a script, by their placeholders.
        board: handle of a `_Board` for progress, where there may be other machines.

    Returns:
        The files of the cell by their path in the folder; none where the folder is shared.
    """
    from ampcompare.experiment.launch.dispatch import make_launcher

    restore(secrets_)
    config = RunConfig.model_validate_json(settings)
    with contextlib.ExitStack() as stack:
        path = Path(folder)
        try:
            shared = (path / TOKEN).read_text(encoding="utf-8") == token
        except OSError:
            shared = False
        if not shared:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ampcompare-ray-")))
        # Ray has set CUDA_VISIBLE_DEVICES; the record names these GPUs. What else runs on the machine is not known.
        place = Place(tuple(visible_gpus()), shared=True) if _resources(config)["num_gpus"] else ANYWHERE
        launcher = stack.enter_context(make_launcher(config.model_copy(update={"launcher": "auto"}), place=place))
        own = launcher.launcher_of(config.model_copy(update={"launcher": "auto"}))  # type: ignore[attr-defined]
        if (
            shared and (path / CellFile.PROGRESS).exists()
        ):  # Ray starts the task again, whose machine or worker was lost
            config = config.model_copy(update={"saving": config.saving.model_copy(update={"resume": "auto"})})
        own.launch(config, path, _reporter(path, folder, place, None if shared else board))
        if shared:
            return {}
        files = [each for each in path.rglob("*") if each.is_file() and not each.is_symlink()]
        return {os.fspath(each.relative_to(path)): each.read_bytes() for each in files}


def _reporter(path: Path, folder: str, place: Place, board: Any) -> Callable[[Progress], None]:
    """Return a function that writes the progress of a cell with its node, and puts it on the board if there is one.

    Args:
        path: where the cell writes.
        folder: of the cell, on the machine that submitted it.
    """
    where = ", ".join(filter(None, [f"node {socket.gethostname()}", str(place)]))
    write = progress_writer(path, where)

    def report(progress: Progress) -> None:
        write(progress)
        board.put.remote(folder, (path / CellFile.PROGRESS).read_text(encoding="utf-8"))

    if board is None:
        return write
    report(Progress(0, 0, 0, "starting"))
    return report
