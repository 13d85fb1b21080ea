"""A cell as a task of a Slurm job: alone, as one of several ranks, or in turn with others."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ampcompare.base.environment.ranks import world_of
from ampcompare.base.errors import Ended
from ampcompare.base.files.run_files import CellFile, log_name
from ampcompare.experiment.launch.cell_files import progress_writer, read_config
from ampcompare.experiment.launch.stop_signal import held_signals
from ampcompare.runs.records.run import read_record
from ampcompare.runs.settings.config import RunConfig

__all__ = ["train", "train_in_turn"]


def train(folder: str) -> None:
    """Train the configuration in a folder, as the rank that the environment names.

    The signal that Slurm sends before a time limit or a preemption stops the cell as SIGTERM does: it saves. A job that
    was queued again resumes from its newest checkpoint; a cell that had ended stays as it is.

    Rank 0 logs to `log.txt` in the folder, rank N to `rank<N>.log`; the record is `record.json`.

    Raises:
        Ended: it was stopped, on rank 0.
    """
    signal.signal(_warning(), lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    cell = Path(folder)
    if _is_queued_again() and _status(cell) in ("completed", "diverged"):
        return
    world = world_of()
    rank = 0 if world is None else world.rank
    with held_signals(), _output_to(cell / log_name(rank)):
        # Imported here: the submitting process needs this function's name, but not torch.
        from ampcompare.experiment.launch.worker.cell import run_cell
        from ampcompare.experiment.launch.worker.rank import run_rank

        on_progress = progress_writer(cell, _place()) if rank == 0 else None
        config = _config_of(cell)
        record = run_cell(config, cell, on_progress) if world is None else run_rank(config, cell, world, on_progress)[0]
    if rank == 0 and record.status == "interrupted":
        raise Ended(f"the cell was {record.error}")  # so that the batch file sees an exit code: see REQUEUE_PREEMPTED


def train_in_turn(folders: list[str]) -> None:
    """Train the configurations in some folders, one after the other, in processes of their own as without Slurm.

    The signals that stop `train` stop the cell that runs, and no other one starts. A job that was queued again trains
    those that have no record, and resumes the one that was stopped.

    Raises:
        Ended: it was stopped, and cells are left.
    """
    from ampcompare.experiment.launch.forked import ForkedLauncher
    from ampcompare.experiment.launch.multi_process import MultiProcessLauncher

    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        for launcher in (alone, together):
            launcher.terminate()

    with ForkedLauncher() as alone, MultiProcessLauncher("spawn") as together:
        for number in (_warning(), signal.SIGTERM):
            signal.signal(number, stop)
        for cell in map(Path, folders):
            if stopped or _status(cell) not in (None, "interrupted"):
                continue
            config = _config_of(cell)
            (alone if config.processes == 1 else together).launch(config, cell, progress_writer(cell, _place()))
    if stopped and any(_status(cell) in (None, "interrupted") for cell in map(Path, folders)):
        raise Ended("the job was asked to stop, and cells are left")


def _status(cell: Path) -> str | None:
    """Return the status of a cell that has a record."""
    path = cell / CellFile.RECORD
    return read_record(path).status if path.exists() else None


def _warning() -> signal.Signals:
    """Return the signal that Slurm sends before it ends a job."""
    return signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"]


def _place() -> str:
    """Return job, nodes and GPUs of this task, for progress."""
    found = os.environ
    job = f"{found['SLURM_ARRAY_JOB_ID']}_{found['SLURM_ARRAY_TASK_ID']}" if "SLURM_ARRAY_JOB_ID" in found else None
    text = f"job {job or found.get('SLURM_JOB_ID', '')} on {found.get('SLURM_JOB_NODELIST', socket.gethostname())}"
    gpus = found.get("SLURM_STEP_GPUS") or found.get("SLURM_JOB_GPUS")
    return f"{text}, GPU {gpus}" if gpus else text


def _config_of(cell: Path) -> RunConfig:
    """Return what to train in a folder; a job that was queued again resumes."""
    config = read_config(cell)
    if _is_queued_again():
        return config.model_copy(update={"saving": config.saving.model_copy(update={"resume": "auto"})})
    return config


def _is_queued_again() -> bool:
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Redirect standard output and error to a file, and restore them afterwards."""
    before = [os.dup(1), os.dup(2)]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for number in (1, 2):
            os.dup2(log, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(log)
