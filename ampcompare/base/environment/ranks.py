"""Rank and world size of this process, read from the environment. Imports no torch."""

from __future__ import annotations

import os
import re
import socket
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ampcompare.base.environment.variables import STARTED_BY
from ampcompare.base.errors import ConfigError

FIRST_PORT, PORTS = 20000, 20000


class RankInGroup(NamedTuple):
    """Which of how many processes of a group this one is, from 0."""

    rank: int
    size: int


class _RankVariables(NamedTuple):
    """The variables in which a launcher tells a process its place among others; "" where it has none."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    nodes: str = ""
    restarts: str = ""


TORCH = _RankVariables(
    "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "", "TORCHELASTIC_RESTART_COUNT"
)
OPEN_MPI = _RankVariables(
    "mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
)
# and Intel MPI
MPICH = _RankVariables("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = _RankVariables(
    "slurm",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "",
    "SLURM_STEP_NUM_NODES",
    "SLURM_RESTART_COUNT",
)
# In this order: in a job of Slurm mpirun starts its daemons by srun, and the ranks inherit the variables of these.
LAUNCHERS = (TORCH, OPEN_MPI, MPICH, SLURM)
MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # Open MPI 5, and 4


@dataclass(frozen=True)
class DistributedEnv:
    """Rank, world size and rendezvous of this process, one of those that train a cell.

    Attributes:
        local_rank, local_size: on this machine.
        url: of the rendezvous: env://, tcp://HOST:PORT or file://PATH.
        attempt: restarts before this one.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    url: str
    attempt: int
    launcher: str

    @property
    def node_count(self) -> int:
        """Number of machines, all with as many processes."""
        return max(1, self.size // self.local_size)


def rank_of_process(environment: Mapping[str, str] | None = None) -> int:
    """Return the rank of this process; 0 if it is the only one, or if the environment is invalid."""
    environment = os.environ if environment is None else environment
    names = _find_rank_variables(environment)
    text = environment.get(names.rank, "0") if names else "0"
    return int(text) if text.isdecimal() else 0


def is_one_of_several_ranks() -> bool:
    """Return whether torchrun, mpirun, srun or a script started this process as one of several ranks."""
    return _find_rank_variables(os.environ) is not None


def rank_in_process_group() -> RankInGroup | None:
    """Return the place of this process in torch's default process group; None where there is none. Imports no torch."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return RankInGroup(int(distributed.get_rank()), int(distributed.get_world_size()))


def has_other_ranks() -> bool:
    """Return whether torch's default process group has other processes than this one."""
    place = rank_in_process_group()
    return place is not None and place.size > 1


def read_distributed_env(
    environment: Mapping[str, str] | None = None, *, url: str | None = None
) -> DistributedEnv | None:
    """Read the variables of torchrun, mpirun or srun.

    Args:
        environment: the variables; None for those of this process.
        url: of the rendezvous, in the place of MASTER_ADDR and MASTER_PORT; "env://" and None leave these.

    Returns:
        Rank, size, and how the ranks find each other; None if nothing has started this process as one of several.

    Raises:
        ConfigError: a variable is missing, is not a number, or the rank is not below the size.
    """
    environment = os.environ if environment is None else environment
    names = _find_rank_variables(environment)
    if names is None:
        return None
    url = None if url == "env://" else url
    if names is TORCH:
        _require_torchrun_variables(environment, url)
    size, rank = _read_whole_number(environment, names.size), _read_whole_number(environment, names.rank)
    if not 0 <= rank < size:
        raise ConfigError(
            f"{names.rank} is {rank} and {names.size} is {size}; ranks go from 0 to {names.size} - 1"
        )
    nodes = _read_whole_number(environment, names.nodes, 1) if names.nodes else 1
    local_size = (
        _read_whole_number(environment, names.local_size, size) if names.local_size else max(1, size // nodes)
    )
    launcher = names.launcher
    if names is TORCH and "TORCHELASTIC_RUN_ID" not in environment:
        launcher = "environment"
    return DistributedEnv(
        rank=rank,
        size=size,
        local_rank=_read_whole_number(environment, names.local_rank, rank % max(1, local_size)),
        local_size=local_size,
        url=url or _rendezvous_address(environment, names, on_one_node=local_size >= size),
        attempt=_read_whole_number(environment, names.restarts, 0) if names.restarts else 0,
        launcher=environment.get(STARTED_BY, launcher) if names is TORCH else launcher,
    )


def loopback_interface() -> str | None:
    """Return the name of the loopback interface, None if it has another name than usual; gloo resolves the host's."""
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    return next((name for name in ("lo", "lo0") if name in names), None)


def _read_whole_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ConfigError(f"the environment variable {name} is {text!r}, not a number from 0")
    return int(text)


def _find_rank_variables(environment: Mapping[str, str]) -> _RankVariables | None:
    """Return the variables that place this process among several; None if it is alone.

    A job of one process counts as alone, except under torchrun, whose group of one is a group. A batch script of
    Slurm is no step, hence none of several.
    """
    for names in LAUNCHERS:
        if names is TORCH:
            if "RANK" in environment or "WORLD_SIZE" in environment:
                return names
        elif names.rank in environment and names.local_rank in environment:
            size = environment.get(names.size, "1")
            if size.isdecimal() and int(size) > 1:
                return names
    return None


def _require_torchrun_variables(environment: Mapping[str, str], url: str | None) -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environment]
    if url is None:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        present = ", ".join(
            f"{name}={environment[name]}"
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
            if name in environment
        )
        raise ConfigError(
            f"the environment has {present} and lacks {', '.join(missing)}; start the processes with torchrun, set "
            "all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of them"
        )


def _rendezvous_address(environment: Mapping[str, str], names: _RankVariables, *, on_one_node: bool) -> str:
    """Return the address at which all ranks meet.

    Only torchrun announces one. The port is the same for all processes of a job, and another one for each job: its
    number comes from what names the job.
    """
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if names is TORCH or (host and port):
        return "env://"
    if names is SLURM:
        host = host or _host_of_first_rank(environment)
        # srun's own port distinguishes two clusters that use one machine and number their jobs alike.
        job = _read_whole_number(environment, "SLURM_JOB_ID", 0) * 31 + _read_whole_number(
            environment, "SLURM_STEP_ID", 0
        )
        job += _read_whole_number(environment, "SLURM_SRUN_COMM_PORT", 0)
    elif on_one_node:
        host = host or "127.0.0.1"
        named = next((environment[name] for name in MPI_JOBS if name in environment), None)
        # MPICH names no job, but one process of it is the parent of all ranks of a machine.
        job = zlib.crc32(named.encode()) if named else os.getppid()
    else:
        raise ConfigError(
            "mpirun started processes on several machines, and MASTER_ADDR and MASTER_PORT do not say where they "
            "meet; pass both on, with Open MPI by -x MASTER_ADDR=HOST -x MASTER_PORT=PORT"
        )
    return f"tcp://{host}:{port or FIRST_PORT + job % PORTS}"


def _host_of_first_rank(environment: Mapping[str, str]) -> str:
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
