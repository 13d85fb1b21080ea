"""Start the ranks of one machine, watch them, and end them all when one fails.

`python -m ampcompare.experiment.launch.start_ranks REQUEST`, with the JSON of a `Request`. The end of standard input,
or SIGTERM, ends every rank and the agent. When a rank fails, `failure.json` in the folder reports which one, and how.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from ampcompare.base.environment.ranks import loopback
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.files.write import write_atomically
from ampcompare.base.processes.start import __file__ as START
from ampcompare.base.processes.start import start_command
from ampcompare.experiment.launch.cell_files import private_folder
from ampcompare.experiment.launch.stop_signal import end_signals

__all__ = ["Request", "main"]

RANK_MODULE = "ampcompare.experiment.launch.worker.rank"
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
SAVE_SECONDS = 30.0  # as torchrun
RENDEZVOUS_PORT = 29400


@dataclass(frozen=True)
class Request:
    """What an agent starts.

    Attributes:
        folder: of the cell, with its `config.json`.
        cell: its name, the same on all machines.
        launcher: "torchrun" or "spawn".
        nproc_per_node, nnodes, node_rank: which of the ranks are on this machine.
        rdzv_endpoint: HOST:PORT on node 0, where agents of several machines rendezvous; one machine needs none.
        max_restarts: maximum number of restarts of all ranks after a failure.
        dist_url: where ranks rendezvous; None leaves it to the launcher.
    """

    folder: str
    cell: str
    launcher: str
    nproc_per_node: int
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    max_restarts: int = 0
    dist_url: str | None = None

    def to_json(self) -> str:
        """Return the command-line form."""
        return json.dumps(asdict(self))


def _torchrun_arguments(request: Request, url: str | None) -> list[str]:
    options = [
        f"--nproc-per-node={request.nproc_per_node}",
        f"--nnodes={request.nnodes}",
        f"--max-restarts={request.max_restarts}",
        f"--monitor-interval={POLL_SECONDS}",
        *(_local_rendezvous() if request.nnodes == 1 else _network_rendezvous(request)),
    ]
    return [*options, START, "-m", RANK_MODULE, request.folder, *filter(None, [url])]


def _local_rendezvous() -> list[str]:
    """Return the options of the only agent, which opens no port."""
    from ampcompare.experiment.launch.local_rendezvous import BACKEND, register

    register()
    return [f"--rdzv-backend={BACKEND}", f"--rdzv-id={secrets.token_hex(16)}", "--local-addr=127.0.0.1"]


def _network_rendezvous(request: Request) -> list[str]:
    """Return the options of agents that rendezvous over the network, which they trust; see SECURITY.md."""
    host, _, port = (request.rdzv_endpoint or "").partition(":")
    port = port or str(RENDEZVOUS_PORT)
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{port}",
        f"--rdzv-id={request.cell}",
        f"--rdzv-conf=is_host={int(request.node_rank == 0)}",
        f"--local-addr={_address_towards(host, int(port))}",
    ]


def _address_towards(host: str, port: int) -> str:
    """Return the address by which `host` reaches this machine; the host's own name may resolve to the loopback."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: the kernel only selects a route
            return str(probe.getsockname()[0])
    except OSError:
        return host


def _run_torchrun(request: Request, url: str | None) -> list[dict[str, int]]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(_torchrun_arguments(request, url)))
    except ChildFailedError as error:
        return [{"rank": rank, "code": failure.exitcode} for rank, failure in error.failures.items()]
    except RendezvousError as error:
        raise _RendezvousFailed(_explain(request, error)) from error
    return []


def _explain(request: Request, error: Exception) -> str:
    endpoint = request.rdzv_endpoint or "this machine"
    text = str(error.__cause__ or error).strip().partition("\n")[0]
    if "EADDRINUSE" in text or "address already in use" in text:
        return f"node 0 cannot listen at {endpoint}: the port is in use; choose another --rdzv-endpoint"
    return f"the {request.nnodes} nodes did not connect at {endpoint}: {text or type(error).__name__}"


def _run_spawn(request: Request, url: str | None) -> list[dict[str, int]]:
    """Start the ranks without torchrun, on one machine or with a `dist_url`."""
    assert url is not None
    size, first = request.nproc_per_node * request.nnodes, request.nproc_per_node * request.node_rank
    for attempt in range(request.max_restarts + 1):
        ranks: list[subprocess.Popen[bytes]] = []
        grace = GRACE_SECONDS
        try:
            for local_rank in range(request.nproc_per_node):
                rank_env = {"RANK": first + local_rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank}
                rank_env |= {"LOCAL_WORLD_SIZE": request.nproc_per_node, "TORCHELASTIC_RESTART_COUNT": attempt}
                ranks.append(_start_rank(request.folder, url, rank_env))
            failures = _watch(ranks, first)
            grace = 0.0  # ranks that wait for one that is gone handle no signal
        except _Stopped as stop:
            grace = SAVE_SECONDS if stop.may_save else grace
            raise
        finally:
            _end(ranks, grace)
        if not failures:
            break
    return failures


def _url(request: Request, private: Path) -> str | None:
    """Return where the ranks rendezvous: on one machine a file that is private to the user, or a loopback port."""
    if request.nnodes > 1:
        return request.dist_url
    if request.dist_url is None:
        return f"file://{private / 'store'}"
    if request.dist_url.startswith("tcp://"):
        return f"tcp://127.0.0.1:{request.dist_url.rpartition(':')[2]}"
    return request.dist_url


def _keep_to_loopback() -> None:
    """Make gloo and NCCL listen at the loopback only, whatever interface the environment names."""
    if (name := loopback()) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
        os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"  # exactly that name, not every name that begins with it


def _start_rank(folder: str, url: str, rank_env: Mapping[str, int]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **{name: str(value) for name, value in rank_env.items()}}
    return subprocess.Popen(start_command(RANK_MODULE, folder, url), env=environment, start_new_session=True)


def _watch(ranks: Sequence[subprocess.Popen[bytes]], first: int) -> list[dict[str, int]]:
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [{"rank": first + index, "code": code} for index, code in enumerate(codes) if code]
        if failed or all(code == 0 for code in codes):
            return failed
        time.sleep(POLL_SECONDS)


def _end(ranks: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + grace
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


class _RendezvousFailed(Exception):
    """The agents of a cell could not connect."""


class _Stopped(Exception):
    """SIGTERM or SIGHUP was received.

    Attributes:
        may_save: whether the ranks get the time to save; not if the launcher is gone.
    """

    def __init__(self, *, may_save: bool) -> None:
        super().__init__()
        self.may_save = may_save


def _stop_on_sigterm_or_stdin() -> None:
    """Raise `_Stopped` in this thread at the first SIGTERM or SIGHUP, or when standard input ends."""
    launcher_gone = threading.Event()
    numbers = end_signals()

    def on_signal(number: int, frame: object) -> NoReturn:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # a signal to the whole group arrives several times
        raise _Stopped(may_save=not launcher_gone.is_set())

    def watch() -> None:
        while os.read(0, 4096):
            pass
        launcher_gone.set()
        os.kill(os.getpid(), signal.SIGTERM)

    for number in numbers:
        signal.signal(number, on_signal)
    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> int:
    """Run the ranks to their end; the exit code is 0, 1 if one failed, or 143 if asked to stop.

    torchrun has its own handlers for SIGTERM, which end its ranks.
    """
    request = Request(**json.loads(arguments[0]))
    os.environ["AMPCOMPARE_STARTED_BY"] = request.launcher
    _stop_on_sigterm_or_stdin()
    if request.nnodes == 1:
        _keep_to_loopback()
    start = _run_torchrun if request.launcher == "torchrun" else _run_spawn
    try:
        with private_folder(Path(request.folder)) as private:
            failures = start(request, _url(request, private))
    except _Stopped:
        return 143
    except _RendezvousFailed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if failures:
        write_atomically(Path(request.folder) / CellFile.FAILURE, json.dumps(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
