"""A pool of rank processes, started once for the session: functions of a test module run on all ranks at once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("rank.py")
SECONDS = 60.0
GRACE_SECONDS = 2.0
POLL_SECONDS = 0.01
RECONNECTIONS = 3  # in a session


class Ranks:
    """Call a function of a test module on `world_size` ranks and return what each rank returned, in order.

    The function gets keyword arguments that JSON can hold, and finds an initialized gloo process group. An exception,
    a death or silence on any rank is an AssertionError that shows it; the pool is then started afresh.
    """

    def __init__(self, folder: Path, python: Any) -> None:
        self._folder = folder
        self._python = python
        self._processes: list[Any] = []
        self._jobs = 0
        self._reconnected = 0

    def __call__(self, world_size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        self._start(world_size)
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
            stdin = self._processes[rank].stdin
            stdin.write(json.dumps(job) + "\n")
            stdin.flush()
        try:
            return self._collect(results)
        except BaseException as error:
            self.close()
            # gloo itself loses a connection now and then while it makes a group, before the function is called.
            if "connectFullMesh failed" in str(error) and self._reconnected < RECONNECTIONS:
                self._reconnected += 1
                return self(world_size, function, **arguments)
            raise

    def _start(self, world_size: int) -> None:
        while len(self._processes) < world_size:
            with self._log(len(self._processes)).open("w") as log:
                environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
                command = [sys.executable, str(SCRIPT)]
                streams = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
                self._processes.append(self._python.popen(command, env=environment, text=True, **streams))

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _collect(self, results: list[Path]) -> list[Any]:
        deadline = time.monotonic() + SECONDS
        outcomes: dict[int, tuple[str, Any]] = {}
        problems: dict[int, str] = {}
        while len(outcomes) + len(problems) < len(results) and time.monotonic() < deadline:
            for rank, result in enumerate(results):
                if rank in outcomes or rank in problems:
                    continue
                code = self._processes[rank].poll()
                if result.exists():
                    kind, value = torch.load(result, weights_only=False)
                    if kind == "returned":
                        outcomes[rank] = (kind, value)
                    else:
                        problems[rank] = value
                elif code is not None:
                    problems[rank] = f"ended with exit code {code}\n{self._log(rank).read_text()[-3000:]}"
            if problems:
                # The others wait for the rank that failed; what they raise by themselves is shown too.
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            time.sleep(POLL_SECONDS)
        for rank in range(len(results)):
            if rank not in outcomes and rank not in problems:
                problems[rank] = "did not answer in time"
        if problems:
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(problems.items())))
        return [outcomes[rank][1] for rank in range(len(results))]

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            # What a killed process left unread cannot be flushed.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        self._processes = []


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory, forked_python: Any) -> Iterator[Ranks]:
    """A pool of rank processes: `ranks(2, function, **arguments)` returns both ranks' values."""
    pool = Ranks(tmp_path_factory.mktemp("ranks"), forked_python)
    yield pool
    pool.close()
