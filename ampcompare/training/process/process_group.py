"""The process group of a cell in one process, and the backend that a group takes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the group as a default argument. Imported after the group exists, as torch does at the first
# operation under a dispatch mode, they would keep a destroyed group and its threads, which can abort an ending process.
import torch.distributed.nn.functional

from ampcompare.base.errors import EnvironmentUnfit
from ampcompare.settings.config import RunConfig
from ampcompare.training.process.device import resolve_device


def choose_group_backend(name: str, device: str) -> str:
    """Return the backend of `torch.distributed`.

    Args:
        name: "gloo", "nccl" or "mpi"; "auto" is nccl between GPUs, if torch has it, and else gloo.
        device: of this rank, such as "cuda:0".

    Raises:
        EnvironmentUnfit: torch has no such backend, or nccl is asked for without GPUs.
    """
    if not dist.is_available():
        raise EnvironmentUnfit("this torch is built without torch.distributed; install another build")
    on_gpu = device.startswith("cuda")
    if name == "auto":
        return "nccl" if on_gpu and dist.is_nccl_available() else "gloo"
    if name == "nccl" and not on_gpu:
        why = "torch sees no GPU" if not torch.cuda.is_available() else f"the device is {device}"
        raise EnvironmentUnfit(f"nccl works between GPUs only, but {why}; use --dist-backend gloo")
    if not getattr(dist, f"is_{name}_available")():
        remedy = "use --dist-backend gloo"
        if name == "mpi":
            remedy += (
                ", which joins ranks of mpirun too; mpi needs a torch built from source with MPI installed"
            )
        raise EnvironmentUnfit(f"this torch is built without {name}; {remedy}")
    return name


@contextlib.contextmanager
def process_group_of_one(backend: str, device: torch.device) -> Iterator[None]:
    """Set up a process group without other processes, for wrappers that require one."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=0, world_size=1, **select_gpu_and_group_options(backend, device)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def process_group_for_cell(config: RunConfig) -> contextlib.AbstractContextManager[None]:
    """Return the process group of a cell in one process, with the backend of several; none if it needs none."""
    if not config.parallel.needs_process_group:
        return contextlib.nullcontext()
    device = resolve_device(config.device)
    return process_group_of_one(choose_group_backend(config.parallel.backend, str(device)), device)


def select_gpu_and_group_options(backend: str, device: torch.device) -> dict[str, Any]:
    """Select the GPU before the first collective, and return the option that binds the group to it.

    Args:
        backend: of `choose_group_backend`.
        device: of this rank.

    Returns:
        Keywords for `init_process_group`; only nccl has one.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # collectives of objects use the current device, cuda:0 by default
    return {"device_id": device} if backend == "nccl" else {}
