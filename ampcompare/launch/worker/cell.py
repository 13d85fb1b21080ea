"""Train a cell in this process, and write its steps and record.

`python -m ampcompare.launch.worker.cell FOLDER` trains the configuration in FOLDER. The composition root is
`train_cell`, which calls the four stages of `stages/`: configure_process, build, run, record.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import psutil

from ampcompare.base.files.loaded_code import watch_code
from ampcompare.launch.base import Progress
from ampcompare.launch.cell_files import read_config, with_code, write_config, write_record
from ampcompare.launch.distributed_env import DistributedEnv
from ampcompare.launch.places import with_place
from ampcompare.launch.worker.failure import failed_with
from ampcompare.launch.worker.stages.build import build
from ampcompare.launch.worker.stages.configure import configure_process
from ampcompare.launch.worker.stages.record import record
from ampcompare.launch.worker.stages.run import run
from ampcompare.launch.worker.warmup_guards import guards_during_warmup
from ampcompare.parallel.ranks import Communicator, SingleProcess
from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig
from ampcompare.training.device import resolve_device
from ampcompare.training.own_group import own_group

__all__ = ["run_cell", "train_cell"]


def run_cell(
    config: RunConfig,
    folder: Path,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunRecord:
    """Train one cell in this process; write `config.json`, `steps.jsonl`, `epochs.jsonl` and `record.json` to `folder`.

    Errors of the user's code, of torch and of this package end in a record with status "failed".
    """
    write_config(config, folder)
    code = watch_code(folder, Path.cwd())
    try:
        with own_group(config):
            result = train_cell(config, folder, on_progress)
    except Exception as error:  # a failed arm is a row of the table, and the other arms run
        with contextlib.suppress(OSError):  # the disk may be full
            traceback.print_exc()
        result = failed_with(config, error)
    code.end()
    result = with_place(with_code(result, folder))
    write_record(result, folder)
    return result


def train_cell(
    config: RunConfig,
    folder: Path,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    ranks: Communicator | None = None,
    device: str | None = None,
    world: DistributedEnv | None = None,
    rendezvous_seconds: float | None = None,
) -> RunRecord:
    """Train one cell in this process, alone or as one of `ranks`; rank 0 writes `steps.jsonl`, the caller the record.

    Args:
        device: of this process, if it is not the configuration's.
        world: how the processes were started, if there are several.
        rendezvous_seconds: from the start of the launcher to the end of the rendezvous; None without one, where the
            start of this process counts.
    """
    with guards_during_warmup(config) as violations:
        begin = time.perf_counter()
        started = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        process_seconds = time.time() - psutil.Process().create_time()
        start_seconds = process_seconds if rendezvous_seconds is None else rendezvous_seconds
        own_device = resolve_device(device or config.device)
        configure_process(config, own_device)
        attempt = 0 if world is None else world.attempt
        if on_progress is not None:
            on_progress(Progress(0, 0, 0, phase="loading data"))
        cell = build(config, folder, own_device, ranks or SingleProcess(), attempt)
        run(cell, on_progress)
        seconds = time.perf_counter() - begin
        result = record(cell, world, start_seconds=start_seconds, seconds=seconds)
    return result.model_copy(update={"guards": violations, "started": started})


def main(arguments: list[str]) -> int:
    """Train the cell whose `config.json` lies in the given folder; the exit code is 0 once a record is written."""
    folder = Path(arguments[0])
    run_cell(read_config(folder), folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
