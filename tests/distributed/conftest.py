"""A pool of rank processes, started once for the session: functions of a test module run on all ranks at once."""

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

SCRIPT = Path(__file__).with_name("rank.py")
SECONDS = 60.0
GRACE_SECONDS = 2.0
RECONNECTIONS = 3  # in a session


class Process(NamedTuple):
    """A rank: its process, and the socket for its jobs, which answers each of them with a byte."""

    pid: int
    jobs: socket.socket
    log: Path


class Forks:
    """The process from which ranks are forked; it starts with the first of them."""

    def __init__(self, python: Any) -> None:
        self._python = python
        self._requests: socket.socket | None = None

    def start(self, log: Path) -> Process:
        if self._requests is None:
            self._requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            number = theirs.fileno()
            self._python.popen([sys.executable, str(SCRIPT), str(number)], env=environment, pass_fds=[number])
            theirs.close()
        jobs, theirs = socket.socketpair()
        with theirs, log.open("w") as stream:
            socket.send_fds(self._requests, [b"fork"], [theirs.fileno(), stream.fileno()])
            return Process(int(self._requests.recv(64)), jobs, log)

    def exit_code(self, process: Process) -> int:
        assert self._requests is not None
        self._requests.send(str(process.pid).encode())
        return int(self._requests.recv(64))

    def end(self) -> None:
        if self._requests is not None:
            self._requests.close()


class Ranks:
    """Call a function of a test module on `world_size` ranks and return what each rank returned, in order.

    The function gets keyword arguments that JSON can hold, and finds an initialized gloo process group. An exception,
    a death or silence on any rank is an AssertionError that shows it; the pool is then started afresh. Ranks are forked
    from one process that has imported what they need.
    """

    def __init__(self, folder: Path, forks: Forks) -> None:
        self._folder = folder
        self._forks = forks
        self._processes: list[Process] = []
        self._jobs = 0
        self._reconnected = 0

    def __call__(self, world_size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        while len(self._processes) < world_size:
            self._processes.append(self._forks.start(self._folder / f"rank{len(self._processes)}.log"))
        self._jobs += 1
        results = [self._folder / f"{self._jobs}-{rank}.pt" for rank in range(world_size)]
        for rank, result in enumerate(results):
            job = {
                "file": function.__code__.co_filename,
                "function": function.__name__,
                "rank": rank,
                "world_size": world_size,
                "rendezvous": str(self._folder / f"{self._jobs}.rendezvous"),
                "result": str(result),
                "arguments": arguments,
            }
            self._processes[rank].jobs.sendall(json.dumps(job).encode() + b"\n")
        try:
            return self._collect(results)
        except BaseException as error:
            self.close()
            # gloo itself loses a connection now and then while it makes a group, before the function is called.
            if "connectFullMesh failed" in str(error) and self._reconnected < RECONNECTIONS:
                self._reconnected += 1
                return self(world_size, function, **arguments)
            raise

    def _collect(self, results: list[Path]) -> list[Any]:
        deadline = time.monotonic() + SECONDS
        outcomes: dict[int, Any] = {}
        problems: dict[int, str] = {}
        waiting = {self._processes[rank].jobs: rank for rank in range(len(results))}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for answer in select.select(list(waiting), [], [], left)[0]:
                rank = waiting.pop(answer)
                if answer.recv(1):
                    kind, value = torch.load(results[rank], weights_only=False)
                    (outcomes if kind == "returned" else problems)[rank] = value
                else:
                    process = self._processes[rank]
                    self._processes[rank] = process._replace(pid=0)
                    log = process.log.read_text()[-3000:]
                    problems[rank] = f"ended with exit code {self._forks.exit_code(process)}\n{log}"
            if problems:
                # The others wait for the rank that failed; what they raise by themselves is shown too.
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        problems |= dict.fromkeys(waiting.values(), "did not answer in time")
        if problems:
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(problems.items())))
        return [outcomes[rank] for rank in range(len(results))]

    def close(self) -> None:
        """End the ranks; the next call forks new ones."""
        for process in self._processes:
            if process.pid:
                os.kill(process.pid, signal.SIGKILL)
                self._forks.exit_code(process)
            process.jobs.close()
        self._processes = []


@pytest.fixture(scope="session")
def forks(forked_python: Any) -> Iterator[Forks]:
    """The process from which all ranks are forked."""
    forks = Forks(forked_python)
    yield forks
    forks.end()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[Ranks]:
    """A pool of rank processes: `ranks(2, function, **arguments)` returns both ranks' values."""
    pool = Ranks(tmp_path_factory.mktemp("ranks"), forks)
    yield pool
    pool.close()


@pytest.fixture
def own_ranks(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[Ranks]:
    """A pool for a test whose ranks end or make groups of their own, of which gloo may still close connections."""
    pool = Ranks(tmp_path_factory.mktemp("ranks"), forks)
    yield pool
    pool.close()
