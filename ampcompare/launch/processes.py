"""Several processes per cell, started by torchrun's own code or one by one, on this machine or as one of several."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ampcompare.config import RunConfig
from ampcompare.errors import UnsupportedCombination
from ampcompare.launch.agent import Request
from ampcompare.launch.base import (
    Launcher,
    Progress,
    failed_record,
    interrupted_record,
    last_lines,
    log_tail,
    make_cell_folder,
    write_config,
    write_record,
)
from ampcompare.launch.forked import worker_environment
from ampcompare.launch.progress import PROGRESS_FILE, progress_teller
from ampcompare.record import RunRecord, read_record

__all__ = ["ProcessesLauncher"]

POLL_SECONDS = 0.1
END_SECONDS = 10.0
TAIL_LINES = 5


class ProcessesLauncher(Launcher):
    """Starts `processes` ranks for each cell, this machine's share of them here.

    Args:
        launcher: "torchrun", which several machines and restarts need, or "spawn", which starts faster.
        nnodes, node_rank: machines, and which of them this is.
        rdzv_endpoint: HOST:PORT on node 0, for several machines.
        max_restarts: starts of all ranks after one has failed.
        dist_url: where ranks meet: tcp://HOST:PORT or file://PATH; None leaves it to the launcher.

    Raises:
        UnsupportedCombination: machines that could not find each other.
    """

    def __init__(
        self,
        launcher: Literal["torchrun", "spawn"] = "torchrun",
        *,
        nnodes: int = 1,
        node_rank: int = 0,
        rdzv_endpoint: str | None = None,
        max_restarts: int = 0,
        dist_url: str | None = None,
    ) -> None:
        if not 0 <= node_rank < nnodes:
            raise UnsupportedCombination(f"node rank {node_rank} of {nnodes} nodes; ranks go from 0 to nodes - 1")
        if nnodes > 1 and launcher == "torchrun" and rdzv_endpoint is None:
            raise UnsupportedCombination(
                f"{nnodes} nodes need a place to meet; add --rdzv-endpoint HOST:PORT, with the host of node 0"
            )
        if nnodes > 1 and launcher == "spawn" and dist_url is None:
            raise UnsupportedCombination(f"{nnodes} nodes need a place to meet; add --dist-url tcp://HOST:PORT")
        self.launcher = launcher
        self._options: dict[str, Any] = {
            "nnodes": nnodes,
            "node_rank": node_rank,
            "rdzv_endpoint": rdzv_endpoint,
            "max_restarts": max_restarts,
            "dist_url": None if dist_url == "env://" else dist_url,
        }
        self.speaks = node_rank == 0
        self._agent: subprocess.Popen[bytes] | None = None
        self._terminated = False

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        nnodes = self._options["nnodes"]
        if config.processes % nnodes:
            raise UnsupportedCombination(
                f"{config.processes} processes cannot be split over {nnodes} nodes; use --nproc-per-node"
            )
        folder = folder.resolve()
        if not self.speaks:  # the machines may share their disk
            folder /= f"node{self._options['node_rank']}"
        make_cell_folder(folder)
        for name in ("failure.json", PROGRESS_FILE):
            (folder / name).unlink(missing_ok=True)
        write_config(config, folder)
        request = Request(str(folder), config.digest(), self.launcher, config.processes // nnodes, **self._options)
        code = self._run(request, folder, on_progress)
        return self._record(config, folder, code)

    def _run(self, request: Request, folder: Path, on_progress: Callable[[Progress], None] | None) -> int:
        environment = worker_environment()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        with (folder / "launcher.log").open("wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches this process alone, which then ends the ranks.
            self._agent = subprocess.Popen(
                [sys.executable, "-m", "ampcompare.launch.agent", request.to_json()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        tell = progress_teller(folder, on_progress)
        while (code := self._agent.poll()) is None:
            time.sleep(POLL_SECONDS)
            tell()
        self.close()
        return code

    def _record(self, config: RunConfig, folder: Path, code: int) -> RunRecord:
        path = folder / "record.json"
        record = read_record(path) if path.exists() else None
        if code == 0 and record is not None:
            return record
        if code == 0 and not self.speaks:  # whose record is on the machine of rank 0
            return RunRecord(cell=config.digest(), arm=config.arm, status="completed", config=config)
        killed = self._killed(folder)
        if self._terminated and killed is None:
            if record is None:
                record = interrupted_record(config)
                write_record(record, folder)
            return record
        if record is None or killed is not None:
            record = failed_record(config, self._story(folder, code, killed))
            write_record(record, folder)
        return record

    def _killed(self, folder: Path) -> dict[str, int] | None:
        """Return the rank that a signal has ended; SIGTERM is what the others get when one has failed."""
        failures = _failures(folder)
        return next(
            (failure for failure in failures if failure["code"] < 0 and failure["code"] != -signal.SIGTERM), None
        )

    def _story(self, folder: Path, code: int, killed: dict[str, int] | None) -> str:
        failure = killed or next(iter(_failures(folder)), None)
        if failure is None:
            words = " | ".join(line.strip() for line in last_lines(folder / "launcher.log", TAIL_LINES))
            return f"the launcher of the ranks ended with exit code {code}" + (f": {words}" if words else "")
        rank, how = failure["rank"], f"ended with exit code {failure['code']}"
        if failure["code"] < 0:
            how = f"was killed by {signal.Signals(-failure['code']).name}"
            if failure["code"] == -signal.SIGKILL:
                how += " (out of memory, if nobody killed it)"
        tail = " | ".join(log_tail(folder, TAIL_LINES, rank).splitlines())
        return f"rank {rank} {how}" + (f"; last lines of its log: {tail}" if tail else "; its log is empty")

    def terminate(self) -> bool:
        agent = self._agent
        if agent is None:
            return False
        self._terminated = True
        agent.terminate()
        return True

    def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is None:
            return
        assert agent.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            agent.stdin.close()  # the agent ends its ranks and itself
        try:
            agent.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGKILL)  # ranks end when their parent is gone
            agent.wait()


def _failures(folder: Path) -> list[dict[str, int]]:
    try:
        found: list[dict[str, int]] = json.loads((folder / "failure.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return found
