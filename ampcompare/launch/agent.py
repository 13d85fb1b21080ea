"""The process that starts the ranks of one machine, watches them, and ends them all when one fails.

`python -m ampcompare.launch.agent REQUEST`, with the JSON of a `Request`. The end of standard input, or SIGTERM, ends
every rank and the agent. When a rank has failed, `failure.json` in the folder says which one, and how.
"""

from __future__ import annotations

import json
import os
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

from ampcompare.record import write_atomically

__all__ = ["Request", "main"]

RANK_MODULE = "ampcompare.launch.rank"
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
SAVE_SECONDS = 30.0  # as long as torchrun waits
RENDEZVOUS_PORT = 29400


@dataclass(frozen=True)
class Request:
    """What an agent is to start.

    Attributes:
        folder: of the cell; its `config.json` says what to train.
        cell: its name, equal on all machines.
        launcher: "torchrun" or "spawn".
        nproc_per_node, nnodes, node_rank: which of the ranks are on this machine.
        rdzv_endpoint: HOST:PORT on node 0, where agents of several machines meet.
        max_restarts: how often all ranks are started again after a failure.
        dist_url: where ranks meet; None leaves it to the launcher.
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


def _torchrun_arguments(request: Request) -> list[str]:
    host, _, port = (request.rdzv_endpoint or "127.0.0.1:0").partition(":")
    port = port or str(RENDEZVOUS_PORT)
    words = [
        f"--nproc-per-node={request.nproc_per_node}",
        f"--nnodes={request.nnodes}",
        f"--max-restarts={request.max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{port}",
        f"--rdzv-id={request.cell}",
        f"--rdzv-conf=is_host={int(request.node_rank == 0)}",
        f"--local-addr={_address_towards(host, int(port))}",
        f"--monitor-interval={POLL_SECONDS}",
    ]
    return [*words, "-m", RANK_MODULE, request.folder, *filter(None, [request.dist_url])]


def _address_towards(host: str, port: int) -> str:
    """Return the address by which `host` reaches this machine; a name of its own may stand for the loopback."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: the kernel only picks a route
            return str(probe.getsockname()[0])
    except OSError:
        return host


def _run_torchrun(request: Request) -> list[dict[str, int]]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(_torchrun_arguments(request)))
    except ChildFailedError as error:
        return [{"rank": rank, "code": failure.exitcode} for rank, failure in error.failures.items()]
    except RendezvousError as error:
        raise _NotMet(_why_not_met(request, error)) from error
    return []


def _why_not_met(request: Request, error: Exception) -> str:
    where = request.rdzv_endpoint or "this machine"
    text = str(error.__cause__ or error).strip().partition("\n")[0]
    if "EADDRINUSE" in text or "address already in use" in text:
        return f"node 0 cannot listen at {where}: the port is in use; choose another --rdzv-endpoint"
    return f"the {request.nnodes} nodes did not meet at {where}: {text or type(error).__name__}"


def _run_spawn(request: Request) -> list[dict[str, int]]:
    """Start the ranks without torchrun: no agents that meet, no restarts but our own."""
    size, first = request.nproc_per_node * request.nnodes, request.nproc_per_node * request.node_rank
    for attempt in range(request.max_restarts + 1):
        url = request.dist_url or _meeting_file(request.folder, attempt)
        ranks: list[subprocess.Popen[bytes]] = []
        grace = GRACE_SECONDS
        try:
            for local_rank in range(request.nproc_per_node):
                place = {"RANK": first + local_rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank}
                place |= {"LOCAL_WORLD_SIZE": request.nproc_per_node, "TORCHELASTIC_RESTART_COUNT": attempt}
                ranks.append(_start_rank(request.folder, url, place))
            failures = _watch(ranks, first)
            grace = 0.0  # ranks that wait for one that is gone do not hear of anything else
        except _Ended as ended:
            grace = SAVE_SECONDS if ended.may_save else grace
            raise
        finally:
            _end(ranks, grace)
        if not failures:
            break
    return failures


def _meeting_file(folder: str, attempt: int) -> str:
    path = Path(folder) / f"meeting{attempt}"
    path.unlink(missing_ok=True)  # of an earlier run: a file that was used once joins nobody
    return f"file://{path}"


def _start_rank(folder: str, url: str, place: Mapping[str, int]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    return subprocess.Popen([sys.executable, "-m", RANK_MODULE, folder, url], env=environment, start_new_session=True)


def _watch(ranks: Sequence[subprocess.Popen[bytes]], first: int) -> list[dict[str, int]]:
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [{"rank": first + place, "code": code} for place, code in enumerate(codes) if code]
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


class _NotMet(Exception):
    """The agents of a cell did not find each other."""


class _Ended(Exception):
    """SIGTERM came.

    Attributes:
        may_save: whether the ranks have the time to save; not where nobody is left who would use it.
    """

    def __init__(self, *, may_save: bool) -> None:
        super().__init__()
        self.may_save = may_save


def _end_with_sigterm_or_stdin() -> None:
    """Raise `_Ended` in this thread at the first SIGTERM, or when standard input ends."""
    alone = threading.Event()

    def on_sigterm(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # more may come, from whoever sends it to a whole group
        raise _Ended(may_save=not alone.is_set())

    def watch() -> None:
        while os.read(0, 4096):
            pass
        alone.set()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_sigterm)
    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> int:
    """Run the ranks to their end; the exit code is 0, 1 where one failed, or 143 where it was told to end.

    torchrun has handlers of its own for SIGTERM, which end its ranks.
    """
    request = Request(**json.loads(arguments[0]))
    os.environ["AMPCOMPARE_STARTED_BY"] = request.launcher
    _end_with_sigterm_or_stdin()
    try:
        failures = (_run_torchrun if request.launcher == "torchrun" else _run_spawn)(request)
    except _Ended:
        return 143
    except _NotMet as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if failures:
        write_atomically(Path(request.folder) / "failure.json", json.dumps(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
