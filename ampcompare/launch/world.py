"""Which of how many processes this one is, as whoever started it says in the environment. Imports no torch."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ampcompare.errors import ConfigError

__all__ = ["World", "loopback", "rank_of", "world_of"]

FIRST_PORT, PORTS = 20000, 20000


@dataclass(frozen=True)
class World:
    """The place of this process among those that train one cell.

    Attributes:
        rank, size: of this process and of all.
        local_rank, local_size: the same on this machine.
        url: where the processes meet: env://, tcp://HOST:PORT or file://PATH.
        attempt: restarts before this one.
        launcher: what started the processes.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    url: str
    attempt: int
    launcher: str

    @property
    def nodes(self) -> int:
        """Number of machines, all with as many processes."""
        return max(1, self.size // self.local_size)


def rank_of(environment: Mapping[str, str] | None = None) -> int:
    """Return the rank of this process, 0 where nobody has started several or the environment makes no sense."""
    environment = os.environ if environment is None else environment
    text = environment.get("SLURM_PROCID", "0") if _in_slurm(environment) else "0"
    text = environment.get("RANK", text)
    return int(text) if text.isdecimal() else 0


def world_of(environment: Mapping[str, str] | None = None, *, url: str | None = None) -> World | None:
    """Read RANK, WORLD_SIZE and their kin as torchrun sets them, or SLURM_* as srun does; None where neither did.

    Args:
        environment: variables; those of this process by default.
        url: where to meet instead of at MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: a variable is missing or is no number.
    """
    environment = os.environ if environment is None else environment
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return _slurm_world(environment, url) if _in_slurm(environment) else None
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environment]
    if url in (None, "env://"):
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        there = ", ".join(
            f"{name}={environment[name]}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environment
        )
        raise ConfigError(
            f"the environment has {there} and lacks {', '.join(missing)}; start the processes with torchrun, set "
            "all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of them"
        )
    size, rank = _number(environment, "WORLD_SIZE"), _number(environment, "RANK")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE is {size}; ranks go from 0 to WORLD_SIZE - 1")
    local_size = _number(environment, "LOCAL_WORLD_SIZE", size)
    return World(
        rank=rank,
        size=size,
        local_rank=_number(environment, "LOCAL_RANK", rank % max(1, local_size)),
        local_size=local_size,
        url=url or "env://",
        attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        launcher=environment.get(
            "AMPCOMPARE_STARTED_BY", "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "environment"
        ),
    )


def loopback() -> str | None:
    """Return the name of the interface that reaches this machine only; gloo else asks for the host's name."""
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    return next((name for name in ("lo", "lo0") if name in names), None)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ConfigError(f"the environment variable {name} is {text!r}, not a number from 0")
    return int(text)


def _in_slurm(environment: Mapping[str, str]) -> bool:
    """Tell a task of `srun` with several tasks; a batch script sees other variables of Slurm and is none."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    return tasks.isdecimal() and int(tasks) > 1 and "SLURM_PROCID" in environment


def _slurm_world(environment: Mapping[str, str], url: str | None) -> World:
    size, nodes = _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_STEP_NUM_NODES", 1)
    if url is None:
        # A port of its own for each step of each job, the same for all its tasks; the one that srun itself listens at
        # tells two clusters apart that use one machine and count their jobs alike.
        step = _number(environment, "SLURM_JOB_ID", 0) * 31 + _number(environment, "SLURM_STEP_ID", 0)
        step += _number(environment, "SLURM_SRUN_COMM_PORT", 0)
        host = environment.get("MASTER_ADDR") or _first_host(environment)
        port = environment.get("MASTER_PORT") or str(FIRST_PORT + step % PORTS)
        url = f"tcp://{host}:{port}"
    return World(
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        local_size=max(1, size // nodes),
        url=url,
        attempt=_number(environment, "SLURM_RESTART_COUNT", 0),
        launcher="slurm",
    )


def _first_host(environment: Mapping[str, str]) -> str:
    """Return the host of rank 0: the one that srun was called on where it is the only one, else the first of the list.

    `node[03-07,12]` is what Slurm writes for several.
    """
    if environment.get("SLURM_STEP_NUM_NODES", "1") == "1":
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST", "127.0.0.1")
    found = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?", nodes)
    if found is None:
        return nodes
    return found[1] + re.split("[-,]", found[2] or "")[0]
