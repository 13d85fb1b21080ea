"""One rank of a cell that several processes train together.

`python -m ampcompare.experiment.launch.worker.rank FOLDER [URL]` trains the configuration in FOLDER, as the rank that
the environment names. Rank 0 logs to `log.txt` in FOLDER, rank N to `rank<N>.log`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from ampcompare.base.environment.fingerprint import environment_fingerprint
from ampcompare.base.environment.ranks import DistributedEnv, loopback_interface, read_distributed_env
from ampcompare.base.errors import ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.files.loaded_code import UsedInputsRecorder
from ampcompare.base.files.run_files import log_name
from ampcompare.experiment.launch.cell_files import (
    make_writer_of_progress,
    read_config,
    record_with_loaded_code,
    redirect_output_to,
    write_record,
)
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.launch.places import record_with_place
from ampcompare.experiment.launch.stop_signal import request_stop_at_signals
from ampcompare.experiment.launch.worker.cell import exit_when_parent_ends, record_of_failure, train_cell
from ampcompare.experiment.launch.worker.stall import (
    RankPresence,
    is_collective_timeout,
    show_stack_on_signal,
)
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig
from ampcompare.training.parallel.ranks import ProcessGroup, require_equal_on_ranks
from ampcompare.training.process.process_group import choose_group_backend, select_gpu_and_group_options
from ampcompare.training.stop_request import StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

GRACE_SECONDS = 3.0
RECORD_SECONDS = 20.0
CONNECT_SECONDS = 300
BACKLOG = 2048
RENDEZVOUS_SECONDS = 60  # at least: processes import torch first


def train_as_one_rank(
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
    roll: RankPresence | None = None
    show_stack_on_signal()
    code = UsedInputsRecorder(folder, Path.cwd())
    with contextlib.ExitStack() as stack:
        try:
            device = device_of_local_rank(config.device, world)
            backend = choose_group_backend(config.parallel.backend, device)
            store = open_rank_store(world)
            roll = RankPresence(store, world)
            stack.enter_context(
                initialized_process_group(world, store, backend, device, config.stall_timeout)
            )
            ranks = ProcessGroup(torch.device(device))
            rendezvous_seconds = time.time() - (psutil.Process().create_time() if since is None else since)
            facts = {**environment_fingerprint(), "settings": config.digest()}
            facts = {name: value for name, value in facts.items() if name not in ("machine", "processor")}
            require_equal_on_ranks(
                ranks, "environment", facts, "install the same packages and give the same settings"
            )
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
            return _record_of_failed_rank_and_is_printing(config, folder, world, roll, error)
    code.record_used_inputs()
    if world.rank == 0:
        record = record_with_place(record_with_loaded_code(record, folder))
        write_record(record, folder)
    return record, world.rank == 0


def _record_of_failed_rank_and_is_printing(
    config: RunConfig, folder: Path, world: DistributedEnv, roll: RankPresence | None, error: Exception
) -> tuple[RunRecord, bool]:
    """Write the record of a failure, if no other rank failed before; else wait until that has written its own.

    Args:
        roll: of the ranks; None where this one failed before they met.
    """
    record = record_of_failure(config, error, process=f"rank {world.rank}")
    if not _is_first_failed_rank(roll, world, error):
        with request_stop_at_signals(StopRequest()):  # which torchrun sends to the other ranks
            _wait_for_record(roll)
        return record, False
    if roll is not None and is_collective_timeout(error.__cause__ or error):
        message = roll.request_stacks_for_stall_message(config.stall_timeout)
        record = record_of_failure(config, LaunchError(message))
    record = record_with_place(record)
    write_record(record, folder)
    if roll is not None:
        with contextlib.suppress(RuntimeError):  # the process that hosted the store is gone
            roll.report_failure_record_written()
    return record, True


def _is_first_failed_rank(roll: RankPresence | None, world: DistributedEnv, error: Exception) -> bool:
    """Return whether no rank failed before this one; without a store, rank 0 reports the failure."""
    if roll is None:
        return world.rank == 0
    try:
        roll.answer_as_alive()
        return roll.claim_first_failure(error)
    except RuntimeError:  # the process that hosted the store is gone, and its failure is the cause
        return False


def _wait_for_record(roll: RankPresence | None) -> None:
    """Wait until the rank that failed first has written the record, and for it to exit."""
    if roll is not None:
        with contextlib.suppress(RuntimeError):
            roll.wait_for_failure_record(RECORD_SECONDS)
    time.sleep(GRACE_SECONDS)


def main(arguments: list[str]) -> int:
    """Train as one rank; the exit code is 0 unless the record is one of a failure."""
    folder = Path(arguments[0])
    world = read_distributed_env(url=arguments[1] if len(arguments) > 1 else None)
    assert world is not None
    exit_when_parent_ends()
    redirect_output_to(folder / log_name(world.rank))
    config = read_config(folder)
    report = make_writer_of_progress(folder) if world.rank == 0 else None
    record, _ = train_as_one_rank(
        config, folder, world, report, since=psutil.Process(os.getppid()).create_time()
    )
    return 1 if record.status == "failed" else 0


def device_of_local_rank(name: str, world: DistributedEnv) -> str:
    """Return the device of this rank: "auto" and "cuda" mean the GPU of its local rank."""
    if name.partition(":")[0] not in ("auto", "cpu", "cuda"):
        return name
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if ":" in name and world.local_size > 1:
        raise ConfigError(f"device {name} is one GPU for {world.local_size} processes; use --device cuda")
    if torch.cuda.is_available() and world.local_size > torch.cuda.device_count():
        raise EnvironmentUnfit(
            f"{world.local_size} processes were requested on a machine with {torch.cuda.device_count()} GPU(s); use "
            f"--nproc-per-node with at most this many, or --device cpu"
        )
    return name if ":" in name else f"cuda:{world.local_rank}"


def open_rank_store(world: DistributedEnv) -> Store:
    """Return the store that all ranks can read and write."""
    try:
        # A restart must not find the addresses that dead processes left in the store.
        return dist.PrefixStore(f"attempt{world.attempt}", _make_rank_store(world))  # type: ignore[attr-defined]
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise LaunchError(_rendezvous_error_text(error, world)) from error


@contextlib.contextmanager
def initialized_process_group(
    world: DistributedEnv, store: Store, backend: str, device: str, seconds: float
) -> Iterator[None]:
    """Initialize the process group and destroy it on exit; a collective operation may take so many seconds."""
    binding = select_gpu_and_group_options(backend, torch.device(device))
    if world.node_count == 1 and (name := loopback_interface()) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # the host's name may resolve to no address
    store.set_timeout(timedelta(seconds=max(seconds, RENDEZVOUS_SECONDS)))
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=seconds),
            **binding,
        )
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise LaunchError(_rendezvous_error_text(error, world)) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _make_rank_store(world: DistributedEnv) -> Store:
    if world.url == "env://":
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    elif world.url.startswith("tcp://"):
        host, _, port = world.url.removeprefix("tcp://").rpartition(":")
        agent_has_store = False
    elif world.url.startswith("file://"):
        return dist.FileStore(world.url.removeprefix("file://"), world.size)  # type: ignore[attr-defined]
    else:
        raise ValueError(f"{world.url!r} is not env://, tcp://HOST:PORT or file://PATH")
    if not port.isdecimal() or not host:
        raise ValueError(f"{host}:{port} is not HOST:PORT")
    host = host.strip("[]")
    is_master = world.rank == 0 and not agent_has_store
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        world.size,
        is_master=is_master,
        timeout=timedelta(seconds=CONNECT_SECONDS),
        master_listen_fd=_listening_socket(host, int(port)) if is_master else None,
    )


def _listening_socket(host: str, port: int) -> int | None:
    """Return a socket that listens at the address of `host` alone; None where no interface has it, as behind a NAT.

    Left to itself, the store listens on all interfaces.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            raise
        return listening.detach()


def _rendezvous_error_text(error: Exception, world: DistributedEnv) -> str:
    address = world.url
    if address == "env://":
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = str(error).strip().partition("\n")[0]
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return (
            f"rank 0 cannot listen at {address}: the port is in use; choose another one, or stop the program that "
            f"uses it"
        )
    return f"the {world.size} processes could not connect at {address}: {text}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
