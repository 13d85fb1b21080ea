"""A cell as a task of a job that was queued: alone, or as one of several ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from ampcompare.launch.base import log_name, read_config
from ampcompare.launch.progress import report_to
from ampcompare.launch.world import world_of

__all__ = ["train"]


def train(folder: str) -> None:
    """Train the configuration that lies in a folder, with the place that the environment gives to this process.

    The signal that Slurm sends before a time limit, or before it gives the machine to another job, ends the cell as
    SIGTERM does: it saves. A job that was queued again goes on from its newest checkpoint.

    Output of rank 0 goes to `log.txt` there, that of the others to `rank<N>.log`, and the record to `record.json`.
    """
    # Whoever submits a job names this function, and needs no torch for that.
    from ampcompare.launch.rank import run_rank
    from ampcompare.launch.worker import run_cell

    cell = Path(folder)
    world = world_of()
    rank = 0 if world is None else world.rank
    report = report_to(cell) if rank == 0 else None
    name = f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"
    signal.signal(signal.Signals[name], lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    with _output_to(cell / log_name(rank)):
        config = read_config(cell)
        if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
            config = config.model_copy(update={"saving": config.saving.model_copy(update={"resume": "auto"})})
        if world is None:
            run_cell(config, cell, report)
        else:
            run_rank(config, cell, world, report)


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Send standard output and error to a file, and afterwards where they went before."""
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
