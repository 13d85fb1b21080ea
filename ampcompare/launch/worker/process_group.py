"""The process group of a cell, and the store at which its ranks rendezvous."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# Its functions have the group as a default argument. Imported after the group exists, as torch does at the first
# operation under a dispatch mode, they would keep a destroyed group and its threads, which can abort an ending process.
import torch.distributed.nn.functional

from ampcompare.errors import EnvironmentUnfit, LaunchError
from ampcompare.launch.distributed_env import DistributedEnv, loopback
from ampcompare.settings.config import RunConfig
from ampcompare.training.device import resolve_device

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["choose_backend", "group_of_one", "open_store", "own_group", "process_group"]

CONNECT_SECONDS = 300
BACKLOG = 2048
RENDEZVOUS_SECONDS = 60  # at least: processes import torch first


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


def open_store(world: DistributedEnv) -> Store:
    """Return the store that all ranks can read and write.

    Raises:
        LaunchError: it cannot be reached.
    """
    try:
        # A restart must not find the addresses that dead processes left in the store.
        return dist.PrefixStore(f"attempt{world.attempt}", _store(world))  # type: ignore[attr-defined]
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise LaunchError(_explain(error, world)) from error


@contextlib.contextmanager
def process_group(world: DistributedEnv, store: Store, backend: str, device: str, seconds: float) -> Iterator[None]:
    """Initialize the process group and destroy it on exit.

    Args:
        seconds: time limit of a collective operation.

    Raises:
        LaunchError: the rendezvous failed.
    """
    binding = _bound_to(backend, torch.device(device))
    if world.nodes == 1 and (name := loopback()) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # the host's name may resolve to no address
    store.set_timeout(timedelta(seconds=max(seconds, RENDEZVOUS_SECONDS)))
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=seconds),
            **binding,
        )
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise LaunchError(_explain(error, world)) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def group_of_one(backend: str, device: torch.device) -> Iterator[None]:
    """Set up a process group without other processes, for wrappers that require one."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1, **_bound_to(backend, device))
    try:
        yield
    finally:
        dist.destroy_process_group()


def own_group(config: RunConfig) -> contextlib.AbstractContextManager[None]:
    """Return the process group of a cell in one process, with the backend of several; none if it needs none."""
    if not config.parallel.needs_group:
        return contextlib.nullcontext()
    device = resolve_device(config.device)
    return group_of_one(choose_backend(config.parallel.backend, str(device)), device)


def _bound_to(backend: str, device: torch.device) -> dict[str, Any]:
    """Select the GPU before the first collective, and return the option that binds the group to it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # collectives of objects use the current device, cuda:0 by default
    return {"device_id": device} if backend == "nccl" else {}


def _store(world: DistributedEnv) -> Store:
    if world.url == "env://":
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    elif world.url.startswith("tcp://"):
        host, _, port = world.url.removeprefix("tcp://").rpartition(":")
        agent_has_store = False
    elif world.url.startswith("file://"):
        return dist.FileStore(world.url.removeprefix("file://"), world.size)  # type: ignore[attr-defined]
    else:
        raise ValueError(f"{world.url!r} is not env://, tcp://HOST:PORT or file://PATH")
    if not port.isdecimal() or not host:
        raise ValueError(f"{host}:{port} is not HOST:PORT")
    host = host.strip("[]")
    is_master = world.rank == 0 and not agent_has_store
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        world.size,
        is_master=is_master,
        timeout=timedelta(seconds=CONNECT_SECONDS),
        master_listen_fd=_listen(host, int(port)) if is_master else None,
    )


def _listen(host: str, port: int) -> int | None:
    """Return a socket that listens at the address of `host` alone; None where no interface has it, as behind a NAT.

    Left to itself, the store listens on all interfaces.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            raise
        return listening.detach()


def _explain(error: Exception, world: DistributedEnv) -> str:
    address = world.url
    if address == "env://":
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = str(error).strip().partition("\n")[0]
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return f"rank 0 cannot listen at {address}: the port is in use; choose another one, or stop its program"
    return f"the {world.size} processes could not connect at {address}: {text}"
