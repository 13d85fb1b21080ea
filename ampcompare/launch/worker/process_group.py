"""The process group of several ranks, and the store at which they rendezvous."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ampcompare.base.errors import LaunchError
from ampcompare.launch.distributed_env import DistributedEnv, loopback
from ampcompare.training.own_group import bound_to

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["open_store", "process_group"]

CONNECT_SECONDS = 300
BACKLOG = 2048
RENDEZVOUS_SECONDS = 60  # at least: processes import torch first


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
    binding = bound_to(backend, torch.device(device))
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
        return (
            f"rank 0 cannot listen at {address}: the port is in use; choose another one, or stop the program that "
            f"uses it"
        )
    return f"the {world.size} processes could not connect at {address}: {text}"
