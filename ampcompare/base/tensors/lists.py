"""Lists of tensors, grouped so that each call of a `torch._foreach_` operation gets one dtype.

With targets of several dtypes and sources of one, `torch._foreach_copy_` of torch 2.5 to 2.10 on CUDA runs the
kernel of the first target's dtype on all of them and writes garbage (pytorch#173383). Other operations fall back to one
launch for each tensor.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return one vector with the elements of all tensors, which are of one dtype and on one device."""
    vector: Tensor = _flatten_dense_tensors(tensors)
    return vector


def unflatten(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views into a vector of `flatten` with the shapes of the tensors, in order.

    Args:
        vector: with the elements of all of them, one behind the other.
        tensors: whose shapes the views have.
    """
    return list(_unflatten_dense_tensors(vector, tensors))


def group_tensors_by_type(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype and device, in the order of first appearance."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def is_dense(tensor: Tensor) -> bool:
    """Return whether a strided tensor has no gaps or overlaps in memory: it is contiguous, or its channels are last."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(
        tensor.dim(), torch.contiguous_format
    )
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=channels_last)


def copy_tensors_by_dtype(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, rounding to the target's dtype, with one call for each pair of dtypes.

    Args:
        targets, sources: of equal length, which may be 0, and pairwise of equal shapes.
    """
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = groups.setdefault((target.dtype, source.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for some_targets, some_sources in groups.values():
        torch._foreach_copy_(some_targets, some_sources)


def largest_magnitudes(tensors: Iterable[Tensor]) -> Tensor:
    """Return the largest magnitude of each tensor in fp32, grouped by dtype and device; none may be empty.

    A 2-norm in fp16 overflows on large finite values.
    """
    return torch.cat(
        [
            torch.stack(torch._foreach_norm(alike, math.inf)).float()
            for alike in group_tensors_by_type(tensors)
        ]
    )


def copies_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies on the CPU, in the order given: one transfer, which waits for the device, for each dtype."""
    copies: dict[int, Tensor] = {}
    for group in group_tensors_by_type(tensors):
        flat = flatten([tensor.detach() for tensor in group]).cpu()
        copies.update(zip(map(id, group), unflatten(flat, group), strict=True))
    return [copies[id(tensor)] for tensor in tensors]
