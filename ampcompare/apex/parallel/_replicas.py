"""Make replicas equal: compare models across ranks, and broadcast tensors from rank 0, flattened by dtype."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ampcompare.tensors.lists import by_type

from ._errors import ParallelPreparationError, ProcessGroupMissing

__all__ = ["broadcast_from_first", "check_equal_models", "flat_dist_call", "message_device", "require_group"]


def require_group(what: str) -> None:
    """Raise `ProcessGroupMissing` unless a default process group exists."""
    if not dist.is_initialized():
        raise ProcessGroupMissing(
            f"{what} needs a process group and there is none. Call torch.distributed.init_process_group first (for one "
            "CPU process: backend='gloo', init_method='tcp://127.0.0.1:29500', rank=0, world_size=1)."
        )


def message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where small tensors must lie for the backend of `group`."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@torch.no_grad()
def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run a collective on `tensors` in place, flattened by dtype; an all-reduce becomes an average.

    Args:
        call: a function of `torch.distributed` that works in place on one tensor.
        extra_args: what `call` takes after the tensor.

    Source: Apex 25.05, `apex.parallel.distributed`; training scripts import it.
    """
    for alike in by_type(tensors):
        flat = _flatten_dense_tensors(alike)
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()
        torch._foreach_copy_(alike, list(_unflatten_dense_tensors(flat, alike)))


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite `tensors` with those of the first rank of `group`."""
    source = 0 if group is None else dist.get_global_rank(group, 0)
    for alike in by_type(tensor.detach() for tensor in tensors if tensor.numel()):
        flat = _flatten_dense_tensors(alike)
        # Bytes, because backends lack some dtypes (gloo: bool, fp8).
        dist.broadcast(flat.view(torch.uint8), src=source, group=group)
        torch._foreach_copy_(alike, list(_unflatten_dense_tensors(flat, alike)))


def check_equal_models(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise `ParallelPreparationError` on every rank if parameters differ in name, shape, dtype or `requires_grad`."""
    facts = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    elements = sum(p.numel() for p in module.parameters())
    local_digest = torch.tensor([zlib.crc32(repr(facts).encode()), len(facts), elements], device=message_device(group))
    everybody = [torch.empty_like(local_digest) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, local_digest, group=group)
    reports = [report.tolist() for report in everybody]
    different = [rank for rank, report in enumerate(reports) if report != reports[0]]
    if different:
        rank = different[0]
        raise ParallelPreparationError(
            f"Rank(s) {different} hold another model than rank 0: {reports[rank][1]} parameters with "
            f"{reports[rank][2]} elements on rank {rank}, {reports[0][1]} with {reports[0][2]} on rank 0; names, "
            "shapes, dtypes and requires_grad must be equal. Build the same model on every rank."
        )
