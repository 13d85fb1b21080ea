"""Tensors of which each rank holds a part (`DTensor`), where the rest of the package asks for all or for its own part.

torch.distributed.tensor takes a second to import. Until something has imported it, no tensor is sharded.
"""

import sys
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is spread over ranks."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part that this rank holds, in the tensor's dtype; a tensor that is not sharded is itself.

    The part may be empty: shape (0, ...) where the ranks before hold all of it.
    """
    sharded: Any = tensor
    part: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return part


def gather_whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, in its whole shape and its dtype. Every rank calls it with its part of the same one."""
    sharded: Any = tensor
    gathered: Tensor = sharded.full_tensor() if is_sharded(tensor) else tensor
    return gathered


def gather_tensors_in_tree(value: Any) -> Any:
    """Return nested dictionaries with all of each sharded tensor, gathered to the host one after the other.

    Every rank calls it with its parts of the same tensors. Tensors that are not sharded are passed on, and so is a
    dictionary without sharded ones.
    """
    if isinstance(value, Tensor):
        return gather_whole(value.detach()).cpu() if is_sharded(value) else value
    if isinstance(value, dict):
        gathered = {name: gather_tensors_in_tree(item) for name, item in value.items()}
        return value if all(gathered[name] is item for name, item in value.items()) else gathered
    return value


def shard_like(value: Any, target: Tensor) -> Any:
    """Return this rank's part of `value`, if `target` is sharded and of its shape; without communication.

    Args:
        value: a tensor that every rank has in full; anything else is passed on.
    """
    if (
        not is_sharded(target)
        or not isinstance(value, Tensor)
        or is_sharded(value)
        or value.shape != target.shape
    ):
        return value
    from torch.distributed.tensor import DTensor

    placed: Any = target
    mesh = placed.device_mesh
    part = value.detach().to(target.device)
    for axis, placement in enumerate(placed.placements):
        if placement.is_shard():
            parts, rank = part.chunk(mesh.size(axis), placement.dim), mesh.get_local_rank(axis)
            part = parts[rank] if rank < len(parts) else part.narrow(placement.dim, 0, 0)
    size, stride = (
        value.shape,
        torch.empty_like(value, device="meta", memory_format=torch.contiguous_format).stride(),
    )
    return DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),
        mesh,
        placed.placements,
        run_check=False,
        shape=size,
        stride=stride,
    )
