"""Start the ranks of a cell, watch them, and end them all when one fails.

`python -m ampcompare.experiment.launch.start_ranks REQUEST`, with a `RanksRequest` as JSON. The end of standard input,
or SIGTERM, ends every rank and the agent. When a rank fails, `failure.json` in the folder reports which one, and how.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from ampcompare.base.environment.ranks import loopback_interface
from ampcompare.base.environment.variables import STARTED_BY
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.files.write import write_atomically
from ampcompare.base.processes.start import __file__ as START
from ampcompare.base.processes.start import module_command
from ampcompare.experiment.launch.cell_files import private_temporary_folder
from ampcompare.experiment.launch.stop_signal import stop_signals

RANK_MODULE = "ampcompare.experiment.launch.worker.rank"
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
SAVE_SECONDS = 30.0  # as torchrun


class RanksRequest(NamedTuple):
    """What an agent starts: by "torchrun" or "spawn", some ranks of the cell in a folder."""

    folder: str
    launcher: str
    processes: int


def _register_and_list_torchrun_arguments(request: RanksRequest, url: str) -> list[str]:
    from ampcompare.experiment.launch.local_rendezvous import BACKEND, register_rendezvous

    register_rendezvous()
    return [
        f"--nproc-per-node={request.processes}",
        "--max-restarts=0",
        f"--monitor-interval={POLL_SECONDS}",
        f"--rdzv-backend={BACKEND}",
        f"--rdzv-id={secrets.token_hex(16)}",
        "--local-addr=127.0.0.1",
        *(START, "-m", RANK_MODULE, request.folder, url),
    ]


def _run_torchrun_and_list_failures(request: RanksRequest, url: str) -> list[dict[str, int]]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(_register_and_list_torchrun_arguments(request, url)))
    except ChildFailedError as error:
        return [{"rank": rank, "code": failure.exitcode} for rank, failure in error.failures.items()]
    return []


def _run_spawned_ranks_and_list_failures(request: RanksRequest, url: str) -> list[dict[str, int]]:
    """Start the ranks without torchrun."""
    ranks: list[subprocess.Popen[bytes]] = []
    grace = GRACE_SECONDS
    try:
        for rank in range(request.processes):
            rank_env = {"RANK": rank, "WORLD_SIZE": request.processes, "LOCAL_RANK": rank}
            rank_env |= {"LOCAL_WORLD_SIZE": request.processes, "TORCHELASTIC_RESTART_COUNT": 0}
            ranks.append(_start_rank(request.folder, url, rank_env))
        failures = _watch_ranks_and_list_failures(ranks)
        grace = 0.0  # ranks that wait for one that is gone handle no signal
    except _LauncherLost:
        raise
    except _StopSignalReceived:
        grace = SAVE_SECONDS
        raise
    finally:
        _end_ranks(ranks, grace)
    return failures


def _bind_sockets_to_loopback() -> None:
    """Make gloo and NCCL listen at the loopback only, whatever interface the environment names."""
    if (name := loopback_interface()) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
        os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"  # exactly that name, not every name that begins with it


def _start_rank(folder: str, url: str, rank_env: Mapping[str, int]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **{name: str(value) for name, value in rank_env.items()}}
    return subprocess.Popen(module_command(RANK_MODULE, folder, url), env=environment, start_new_session=True)


def _watch_ranks_and_list_failures(ranks: Sequence[subprocess.Popen[bytes]]) -> list[dict[str, int]]:
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [{"rank": rank, "code": code} for rank, code in enumerate(codes) if code]
        if failed or all(code == 0 for code in codes):
            return failed
        time.sleep(POLL_SECONDS)


def _end_ranks(ranks: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + grace
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


class _StopSignalReceived(Exception):
    """SIGTERM or SIGHUP was received."""


class _LauncherLost(_StopSignalReceived):
    """There is none for which the ranks could save."""


def _raise_at_sigterm_or_stdin_end() -> None:
    """Raise `_StopSignalReceived` in this thread at the first SIGTERM or SIGHUP, or when standard input ends."""
    launcher_gone = threading.Event()
    numbers = stop_signals()

    def on_signal(number: int, frame: object) -> NoReturn:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # a signal to the whole group arrives several times
        raise _LauncherLost if launcher_gone.is_set() else _StopSignalReceived

    def watch_standard_input() -> None:
        while os.read(0, 4096):
            pass
        launcher_gone.set()
        os.kill(os.getpid(), signal.SIGTERM)

    for number in numbers:
        signal.signal(number, on_signal)
    threading.Thread(target=watch_standard_input, daemon=True).start()


def main(arguments: list[str]) -> int:
    """Run the ranks to their end; the exit code is 0, 1 if one failed, or 143 if asked to stop.

    torchrun has its own handlers for SIGTERM, which end its ranks.
    """
    request = RanksRequest(*json.loads(arguments[0]))
    os.environ[STARTED_BY] = request.launcher
    _raise_at_sigterm_or_stdin_end()
    _bind_sockets_to_loopback()
    start = (
        _run_torchrun_and_list_failures
        if request.launcher == "torchrun"
        else _run_spawned_ranks_and_list_failures
    )
    try:
        with private_temporary_folder(Path(request.folder)) as private:
            failures = start(request, f"file://{private / 'store'}")
    except _StopSignalReceived:
        return 143
    if failures:
        write_atomically(Path(request.folder) / CellFile.FAILURE, json.dumps(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
