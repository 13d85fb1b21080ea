"""The process group of a cell: how its processes meet, and what is said when they do not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# Its functions have the group as a default argument. Imported after the group is made, as torch does at the first
# operation under a dispatch mode, they would keep a destroyed group and its threads, which can abort an ending process.
import torch.distributed.nn.functional

from ampcompare.errors import ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.launch.world import World, loopback

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["choose_backend", "group_of_one", "local_device", "process_group"]

MEETING_SECONDS = 300
MESSAGE_SECONDS = 1800


def local_device(name: str, world: World) -> str:
    """Return the device of this process: "auto" and "cuda" mean the GPU of its local rank.

    Raises:
        EnvironmentUnfit: there are fewer GPUs than processes on this machine.
        ConfigError: one GPU was named for several processes.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if ":" in name and world.local_size > 1:
        raise ConfigError(f"device {name} is one GPU for {world.local_size} processes; use --device cuda")
    if torch.cuda.is_available() and world.local_size > torch.cuda.device_count():
        raise EnvironmentUnfit(
            f"{world.local_size} processes were asked for on a machine with {torch.cuda.device_count()} GPU(s); "
            "use --nproc-per-node with at most so many, or --device cpu"
        )
    return name if ":" in name else f"cuda:{world.local_rank}"


def choose_backend(name: str, device: str) -> str:
    """Return the backend of `torch.distributed` for "auto", "gloo", "nccl" or "mpi".

    Raises:
        EnvironmentUnfit: this torch lacks it, or nccl was asked for without GPUs.
    """
    if not dist.is_available():
        raise EnvironmentUnfit("this torch is built without torch.distributed; install another build")
    on_gpu = device.startswith("cuda")
    if name == "auto":
        return "nccl" if on_gpu and dist.is_nccl_available() else "gloo"
    if name == "nccl" and not on_gpu:
        why = "torch sees no GPU" if not torch.cuda.is_available() else f"the device is {device}"
        raise EnvironmentUnfit(f"nccl works between GPUs only, and {why}; use --dist-backend gloo")
    if not getattr(dist, f"is_{name}_available")():
        raise EnvironmentUnfit(f"this torch is built without {name}; use --dist-backend gloo")
    return name


@contextlib.contextmanager
def process_group(world: World, backend: str, device: str) -> Iterator[Store]:
    """Meet the other processes, and part from them at the end; yields the store that all of them can read and write.

    Raises:
        LaunchError: they could not meet.
    """
    options: dict[str, Any] = {"device_id": torch.device(device)} if backend == "nccl" else {}
    if world.nodes == 1 and (name := loopback()) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # a host's own name may stand for no address at all
    try:
        # A restart must not find the addresses that dead processes have left in the store.
        store = dist.PrefixStore(f"attempt{world.attempt}", _store(world))  # type: ignore[attr-defined]
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=MESSAGE_SECONDS),
            **options,
        )
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise LaunchError(_explained(error, world)) from error
    try:
        yield store
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Set up a process group without other processes, for wrappers that ask for one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def _store(world: World) -> Store:
    if world.url == "env://":
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        held_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    elif world.url.startswith("tcp://"):
        host, _, port = world.url.removeprefix("tcp://").rpartition(":")
        held_by_agent = False
    elif world.url.startswith("file://"):
        return dist.FileStore(world.url.removeprefix("file://"), world.size)  # type: ignore[attr-defined]
    else:
        raise ValueError(f"{world.url!r} is not env://, tcp://HOST:PORT or file://PATH")
    if not port.isdecimal() or not host:
        raise ValueError(f"{host}:{port} is not HOST:PORT")
    return dist.TCPStore(  # type: ignore[attr-defined]
        host.strip("[]"),
        int(port),
        world.size,
        is_master=world.rank == 0 and not held_by_agent,
        timeout=timedelta(seconds=MEETING_SECONDS),
    )


def _explained(error: Exception, world: World) -> str:
    where = world.url
    if where == "env://":
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = str(error).strip().partition("\n")[0]
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return f"rank 0 cannot listen at {where}: the port is in use; choose another one, or end what uses it"
    return f"the {world.size} processes could not meet at {where}: {text}"
