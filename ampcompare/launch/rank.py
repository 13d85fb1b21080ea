"""One of several processes that train a cell together.

`python -m ampcompare.launch.rank FOLDER [URL]` trains the configuration that lies in FOLDER, with the place that the
environment gives. Output of rank 0 goes to `log.txt` there, that of the others to `rank<N>.log`.
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
from typing import TYPE_CHECKING

import psutil
import torch

from ampcompare.config import RunConfig
from ampcompare.environment import fingerprint
from ampcompare.launch.base import Progress, log_name, read_config, send_output_to, write_record
from ampcompare.launch.group import choose_backend, local_device, process_group
from ampcompare.launch.progress import report_to
from ampcompare.launch.worker import failed_with, train_cell
from ampcompare.launch.world import World, world_of
from ampcompare.parallel.ranks import Group, require_equal
from ampcompare.record import RunRecord
from ampcompare.training.stopping import StopRequest, stopped_by_sigterm

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["run_rank"]

POLL_SECONDS = 0.5
GRACE_SECONDS = 3.0


def run_rank(
    config: RunConfig,
    folder: Path,
    world: World,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    log: Path | None = None,
    since: float | None = None,
) -> tuple[RunRecord, bool]:
    """Train a cell together with the other ranks.

    Rank 0 writes the record of a run that has ended. Where ranks fail, the first one to say so writes the record, and
    the others only wait for a moment, so that whoever started them sees that one first.

    Args:
        log: file for the traceback of a failure; None means standard error.
        since: when what started the ranks was started itself, in seconds since the epoch; None: this process alone.

    Returns:
        The record, and whether this rank is the one that speaks for all.
    """
    store: Store | None = None
    with contextlib.ExitStack() as stack:
        try:
            device = local_device(config.device, world)
            backend = choose_backend(config.parallel.backend, device)
            store = stack.enter_context(process_group(world, backend, device))
            ranks = Group(torch.device(device))
            met = time.time() - (psutil.Process().create_time() if since is None else since)
            facts = {**fingerprint(), "settings": config.digest()}
            facts = {name: value for name, value in facts.items() if name not in ("machine", "processor")}
            require_equal(ranks, "environment", facts, "install the same packages and give the same settings")
            record = train_cell(config, folder, on_progress, ranks=ranks, device=device, world=world, met=met)
        except Exception as error:  # a failure of a user's code is the record of this cell
            with log.open("w", encoding="utf-8") if log else contextlib.nullcontext() as file:
                traceback.print_exc(file=file)
            record = failed_with(config, error, who=f"rank {world.rank}")
            if not _is_first_to_fail(store, world):
                with stopped_by_sigterm(StopRequest()):  # torchrun's to the other ranks: one has spoken for all
                    time.sleep(GRACE_SECONDS)
                return record, False
            write_record(record, folder)
            return record, True
    if world.rank == 0:
        write_record(record, folder)
    return record, world.rank == 0


def _is_first_to_fail(store: Store | None, world: World) -> bool:
    """Tell whether no rank has failed before this one; where they never met, rank 0 speaks for those that did not."""
    if store is None:
        return world.rank == 0
    try:
        first: bytes = store.compare_set("failed", "", str(world.rank))
        return first.decode() == str(world.rank)
    except RuntimeError:  # the process that held the store is gone, and what ended it is the news
        return False


def _end_with_parent() -> None:
    """End this process when the one that started it is gone; a collective call would else wait for ever."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> int:
    """Train as one rank; the exit code is 0 where the cell has ended with a record that is not of a failure."""
    folder = Path(arguments[0])
    world = world_of(url=arguments[1] if len(arguments) > 1 else None)
    assert world is not None
    _end_with_parent()
    send_output_to(folder / log_name(world.rank))
    config = read_config(folder)
    report = report_to(folder) if world.rank == 0 else None
    record, _ = run_rank(config, folder, world, report, since=psutil.Process(os.getppid()).create_time())
    return 1 if record.status == "failed" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
