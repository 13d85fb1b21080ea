"""Rank and world size of this process, read from the environment. Imports no torch."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ampcompare.base.errors import ConfigError

__all__ = ["DistributedEnv", "is_rank", "loopback", "rank_of", "world_of"]

FIRST_PORT, PORTS = 20000, 20000


@dataclass(frozen=True)
class DistributedEnv:
    """Rank, world size and rendezvous of this process, one of those that train a cell.

    Attributes:
        rank, size: of this process and of all.
        local_rank, local_size: the same on this machine.
        url: of the rendezvous: env://, tcp://HOST:PORT or file://PATH.
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
    """Return the rank of this process; 0 if it is the only one, or if the environment is invalid."""
    environment = os.environ if environment is None else environment
    text = environment.get("SLURM_PROCID", "0") if _in_slurm(environment) else "0"
    text = environment.get("RANK", text)
    return int(text) if text.isdecimal() else 0


def is_rank() -> bool:
    """Return whether torchrun, srun or a script started this process as one of several ranks."""
    return "RANK" in os.environ or _in_slurm(os.environ)


def world_of(environment: Mapping[str, str] | None = None, *, url: str | None = None) -> DistributedEnv | None:
    """Read RANK, WORLD_SIZE and so on as torchrun sets them, or SLURM_* as srun does; None if neither did.

    Args:
        environment: variables; those of this process by default.
        url: of the rendezvous, instead of MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: a variable is missing or is not a number.
    """
    environment = os.environ if environment is None else environment
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return _slurm_world(environment, url) if _in_slurm(environment) else None
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environment]
    if url in (None, "env://"):
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        present = ", ".join(
            f"{name}={environment[name]}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environment
        )
        raise ConfigError(
            f"the environment has {present} and lacks {', '.join(missing)}; start the processes with torchrun, set "
            "all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of them"
        )
    size, rank = _number(environment, "WORLD_SIZE"), _number(environment, "RANK")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE is {size}; ranks go from 0 to WORLD_SIZE - 1")
    local_size = _number(environment, "LOCAL_WORLD_SIZE", size)
    return DistributedEnv(
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
    """Return the name of the loopback interface; by default gloo resolves the host's name instead."""
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
    """Return whether this is one of several tasks of `srun`; a batch script sees other variables of Slurm."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    return tasks.isdecimal() and int(tasks) > 1 and "SLURM_PROCID" in environment


def _slurm_world(environment: Mapping[str, str], url: str | None) -> DistributedEnv:
    size, nodes = _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_STEP_NUM_NODES", 1)
    if url is None:
        # The same port for all tasks of a step, and another one for each step of each job. srun's own port
        # distinguishes two clusters that use one machine and number their jobs alike.
        step = _number(environment, "SLURM_JOB_ID", 0) * 31 + _number(environment, "SLURM_STEP_ID", 0)
        step += _number(environment, "SLURM_SRUN_COMM_PORT", 0)
        host = environment.get("MASTER_ADDR") or _first_host(environment)
        port = environment.get("MASTER_PORT") or str(FIRST_PORT + step % PORTS)
        url = f"tcp://{host}:{port}"
    return DistributedEnv(
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        local_size=max(1, size // nodes),
        url=url,
        attempt=_number(environment, "SLURM_RESTART_COUNT", 0),
        launcher="slurm",
    )


def _first_host(environment: Mapping[str, str]) -> str:
    """Return the host of rank 0: this one if there is one node, otherwise the first of the node list.

    Slurm writes several as `node[03-07,12]`.
    """
    if environment.get("SLURM_STEP_NUM_NODES", "1") == "1":
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST", "127.0.0.1")
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?", nodes)
    if match is None:
        return nodes
    return match[1] + re.split("[-,]", match[2] or "")[0]
