"""Find the rank that stalls while others wait for it, and show the stack of each."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from ampcompare.base.environment.ranks import DistributedEnv

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

STACK_SIGNAL = getattr(signal, "SIGRTMIN", None) or getattr(signal, "SIGUSR1", None)
ANSWER_SECONDS = 5.0
STACK_SECONDS = 0.5
POLL_SECONDS = 0.1
# Messages of gloo and of torch's stores.
TIMEOUT = re.compile(
    r"gloo.*timed out|wait timeout after|timeout waiting for key|socket timeout", re.IGNORECASE
)
LOST = re.compile(r"closed by peer|reset by peer|broken pipe|pair closure|connection refused", re.IGNORECASE)


def is_collective_timeout(error: BaseException) -> bool:
    """Return whether an operation of torch.distributed timed out while it waited for another rank."""
    return isinstance(error, RuntimeError) and TIMEOUT.search(str(error)) is not None


def is_lost_connection(error: BaseException) -> bool:
    """Return whether the connection to another rank was lost, whose own error is the one to report."""
    return isinstance(error, RuntimeError) and LOST.search(str(error)) is not None


def show_stack_on_signal() -> None:
    """Make `STACK_SIGNAL` write the stack of every thread of this process to standard error, which is its log."""
    with contextlib.suppress(io.UnsupportedOperation, AttributeError):  # standard error is not a file
        if STACK_SIGNAL is not None:
            faulthandler.register(STACK_SIGNAL, all_threads=True)


class RankPresence:
    """Which ranks have started, and which still react after a failure, in a store of all ranks."""

    def __init__(self, store: Store, world: DistributedEnv) -> None:
        self._store = store
        self._world = world
        entry = {"pid": os.getpid(), "machine": _key_shared_by_processes_of_machine()}
        store.set(f"process{world.rank}", json.dumps(entry))

    def answer_as_alive(self) -> None:
        """Report that this rank still reacts."""
        self._store.set(f"answer{self._world.rank}", "1")

    def request_stacks_for_stall_message(self, seconds: float) -> str:
        """Request the stack of each rank of this machine, and name those for which others waited so many seconds."""
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        for rank in others:
            self._ask_rank_for_stack(rank)
        stalled = self._ranks_that_set_no_key(others, "process", 0.0) or self._ranks_that_set_no_key(
            others, "answer", ANSWER_SECONDS
        )
        time.sleep(STACK_SECONDS)
        waited = f"within {seconds:g} s (--stall-timeout)"
        if not stalled:
            return f"no rank answered another {waited}, and all still run: check the network between them"
        names = (
            f"rank {stalled[0]} stands"
            if len(stalled) == 1
            else f"ranks {', '.join(map(str, stalled))} stand"
        )
        return f"{names} still: no answer {waited}; the stack of each rank is in its log"

    def _ask_rank_for_stack(self, rank: int) -> None:
        """Make a rank of this machine write its stack."""
        if STACK_SIGNAL is not None and self._store.check([f"process{rank}"]):
            entry = json.loads(self._store.get(f"process{rank}"))
            if entry["machine"] == _key_shared_by_processes_of_machine():
                with contextlib.suppress(OSError):  # it has ended
                    os.kill(entry["pid"], STACK_SIGNAL)

    def _ranks_that_set_no_key(self, ranks: Sequence[int], key: str, seconds: float) -> list[int]:
        """Return the ranks that have not set a key after a wait for all of them."""
        deadline = time.monotonic() + seconds
        while True:
            missing = [rank for rank in ranks if not self._store.check([f"{key}{rank}"])]
            if not missing or time.monotonic() >= deadline:
                return missing
            time.sleep(POLL_SECONDS)

    def claim_first_failure(self, error: BaseException) -> bool:
        """Return whether no rank failed before this one; after a lost connection, wait for the rank that caused it."""
        deadline = time.monotonic() + (ANSWER_SECONDS if is_lost_connection(error) else 0.0)
        while time.monotonic() < deadline and not self._store.check(["failed"]):
            time.sleep(POLL_SECONDS)
        first: bytes = self._store.compare_set("failed", "", str(self._world.rank))
        return first.decode() == str(self._world.rank)

    def report_failure_record_written(self) -> None:
        """Report that the record of the failure is written."""
        self._store.set("recorded", "1")

    def wait_for_failure_record(self, seconds: float) -> None:
        """Wait until the rank that failed first has written the record."""
        self._store.wait(["recorded"], timedelta(seconds=seconds))


def _key_shared_by_processes_of_machine() -> str:
    """Return a key that processes share if they can signal each other: host, boot time, PID namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {psutil.boot_time():.0f} {namespace}"
