"""One rank of a cell that several processes train together.

`python -m ampcompare.launch.worker.rank FOLDER [URL]` trains the configuration in FOLDER, as the rank that the
environment names. Rank 0 logs to `log.txt` in FOLDER, rank N to `rank<N>.log`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from ampcompare.base.environment.versions import fingerprint
from ampcompare.base.errors import LaunchError
from ampcompare.base.files.loaded_code import watch_code
from ampcompare.launch.base import Progress
from ampcompare.launch.cell_files import log_name, progress_writer, read_config, send_output_to, with_code, write_record
from ampcompare.launch.distributed_env import DistributedEnv, world_of
from ampcompare.launch.places import with_place
from ampcompare.launch.stop_signal import stopped_by_signal
from ampcompare.launch.worker.cell import train_cell
from ampcompare.launch.worker.device import local_device
from ampcompare.launch.worker.failure import failed_with
from ampcompare.launch.worker.process_group import open_store, process_group
from ampcompare.launch.worker.stall import Roll, is_timeout, show_stack_on_signal
from ampcompare.parallel.ranks import ProcessGroup, require_equal
from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig
from ampcompare.training.own_group import choose_backend
from ampcompare.training.stop_request import StopRequest

__all__ = ["run_rank"]

POLL_SECONDS = 0.5
GRACE_SECONDS = 3.0
RECORD_SECONDS = 20.0


def run_rank(
    config: RunConfig,
    folder: Path,
    world: DistributedEnv,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    log: Path | None = None,
    since: float | None = None,
) -> tuple[RunRecord, bool]:
    """Train a cell together with the other ranks.

    Rank 0 writes the record of a run. If ranks fail, the first one writes the record; the others wait before they exit,
    so that the launcher sees the cause first.

    Args:
        log: file for the traceback of a failure; None means standard error.
        since: start of the launcher, in seconds since the epoch; None means the start of this process.

    Returns:
        The record, and whether this rank is the one that prints it.
    """
    roll: Roll | None = None
    show_stack_on_signal()
    code = watch_code(folder, Path.cwd())
    with contextlib.ExitStack() as stack:
        try:
            device = local_device(config.device, world)
            backend = choose_backend(config.parallel.backend, device)
            store = open_store(world)
            roll = Roll(store, world)
            stack.enter_context(process_group(world, store, backend, device, config.stall_timeout))
            ranks = ProcessGroup(torch.device(device))
            rendezvous_seconds = time.time() - (psutil.Process().create_time() if since is None else since)
            facts = {**fingerprint(), "settings": config.digest()}
            facts = {name: value for name, value in facts.items() if name not in ("machine", "processor")}
            require_equal(ranks, "environment", facts, "install the same packages and give the same settings")
            record = train_cell(
                config,
                folder,
                on_progress,
                ranks=ranks,
                device=device,
                world=world,
                rendezvous_seconds=rendezvous_seconds,
            )
        except Exception as error:  # any failure of a user's code becomes the record of this cell
            with contextlib.suppress(OSError):  # the disk may be full
                with log.open("w", encoding="utf-8") if log else contextlib.nullcontext() as file:
                    traceback.print_exc(file=file)
            record = failed_with(config, error, process=f"rank {world.rank}")
            if not _is_first_to_fail(roll, world, error):
                with stopped_by_signal(StopRequest()):  # which torchrun sends to the other ranks
                    _wait_for_record(roll)
                return record, False
            if roll is not None and is_timeout(error.__cause__ or error):
                record = failed_with(config, LaunchError(roll.find_stalled(config.stall_timeout)))
            record = with_place(record)
            write_record(record, folder)
            if roll is not None:
                with contextlib.suppress(RuntimeError):  # the process that hosted the store is gone
                    roll.close()
            return record, True
    code.end()
    if world.rank == 0:
        record = with_place(with_code(record, folder))
        write_record(record, folder)
    return record, world.rank == 0


def _is_first_to_fail(roll: Roll | None, world: DistributedEnv, error: Exception) -> bool:
    """Return whether no rank failed before this one; without a store, rank 0 reports the failure."""
    if roll is None:
        return world.rank == 0
    try:
        roll.answer()
        return roll.is_first_to_fail(error)
    except RuntimeError:  # the process that hosted the store is gone, and its failure is the cause
        return False


def _wait_for_record(roll: Roll | None) -> None:
    """Wait until the rank that failed first has written the record, and for it to exit."""
    if roll is not None:
        with contextlib.suppress(RuntimeError):
            roll.wait_for_record(RECORD_SECONDS)
    time.sleep(GRACE_SECONDS)


def _end_with_parent() -> None:
    """Exit when the parent process is gone; a collective call would otherwise wait forever."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> int:
    """Train as one rank; the exit code is 0 unless the record is one of a failure."""
    folder = Path(arguments[0])
    world = world_of(url=arguments[1] if len(arguments) > 1 else None)
    assert world is not None
    _end_with_parent()
    send_output_to(folder / log_name(world.rank))
    config = read_config(folder)
    report = progress_writer(folder) if world.rank == 0 else None
    record, _ = run_rank(config, folder, world, report, since=psutil.Process(os.getppid()).create_time())
    return 1 if record.status == "failed" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
