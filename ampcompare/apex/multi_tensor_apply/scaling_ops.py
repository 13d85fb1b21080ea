"""Apex's operations that scale, add and measure lists of tensors; for their arguments see `ampcompare.apex.amp_C`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompare.apex.multi_tensor_apply import arithmetic

__all__ = [
    "TensorLists",
    "checked",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_scale",
    "multi_tensor_unscale_l2norm",
]


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """[in, out]: write `in * scale`; the flag is set if any input is not finite, all outputs are written anyway."""
    inputs, outputs = checked(tensor_lists, noop_flag, 2)
    _raise_flag(noop_flag, arithmetic.scale(inputs, outputs, scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, a: float, b: float, arg_to_check: int
) -> None:
    """[x, y, out]: write `a * x + b * y`; the flag reports inf or NaN in both (`arg_to_check` -1), x (0) or y (1)."""
    xs, ys, outputs = checked(tensor_lists, noop_flag, 3)
    if arg_to_check not in (-1, 0, 1):
        raise RuntimeError(f"arg_to_check is {arg_to_check}; it must be -1 (check both), 0 (check x) or 1 (check y)")
    watched = {-1: [*xs, *ys], 0: xs, 1: ys}[arg_to_check]
    _raise_flag(noop_flag, arithmetic.non_finite(watched))
    arithmetic.axpby(xs, ys, outputs, a, b)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """[x]: return (norm of all, shape (1,); norms of each, shape (n,), or (0,) unless `per_tensor`), both fp32."""
    (tensors,) = checked(tensor_lists, noop_flag, 1)
    return _norms(noop_flag, tensors, per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """[x]: as `multi_tensor_l2norm`, but zeros where the flag is already set."""
    (tensors,) = checked(tensor_lists, noop_flag, 1)
    skipped = noop_flag.reshape(()) != 0
    both = _norms(noop_flag, tensors, per_tensor)
    return torch.where(skipped, 0.0, both[0]), torch.where(skipped, 0.0, both[1])


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """[in, out]: write `in * scale`, and return the norms of `in` as `multi_tensor_l2norm` does."""
    inputs, outputs = checked(tensor_lists, noop_flag, 2)
    both = _norms(noop_flag, inputs, per_tensor)
    arithmetic.scale(inputs, outputs, scale)
    return both


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, inv_scale: Tensor, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """[x]: return the norms of `x * inv_scale` as `multi_tensor_l2norm` does; `x` is not changed."""
    (tensors,) = checked(tensor_lists, noop_flag, 1)
    total, each = _norms(noop_flag, tensors, per_tensor)
    factor = inv_scale.reshape(()).abs()
    return total * factor, each * factor


def _norms(noop_flag: Tensor, tensors: Sequence[Tensor], per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    each = arithmetic.per_tensor_norms(tensors)
    total = torch.linalg.vector_norm(each).reshape(1)
    _raise_flag(noop_flag, ~torch.isfinite(total))
    return total, each if per_tensor else each.new_empty(0)


TensorLists = Sequence[Sequence[Tensor]]


def checked(lists: TensorLists, noop_flag: Tensor, *counts: int) -> list[list[Tensor]]:
    """Return the lists of an operation that takes one of `counts` lists.

    Raises:
        RuntimeError: another number of lists, empty or unequal ones, unequal shapes, a dtype that is not floating, or
            a tensor that is not on the device of the flag.
    """
    if len(lists) not in counts:
        raise RuntimeError(f"got {len(lists)} tensor lists; this operation takes {' or '.join(map(str, counts))}")
    lengths = [len(tensors) for tensors in lists]
    if not lengths[0] or len(set(lengths)) != 1:
        raise RuntimeError(f"tensor lists have lengths {lengths}; they must be equal and not zero")
    for index, row in enumerate(zip(*lists, strict=True)):
        if any(tensor.shape != row[0].shape for tensor in row):
            raise RuntimeError(
                f"tensors at index {index} have shapes {[tuple(t.shape) for t in row]}; they must be equal"
            )
        for tensor in row:
            if not tensor.is_floating_point():
                raise RuntimeError(f"tensor at index {index} has dtype {tensor.dtype}; a floating dtype is needed")
            if tensor.device != noop_flag.device:
                raise RuntimeError(
                    f"tensor at index {index} is on {tensor.device}, the flag on {noop_flag.device}; use one device"
                )
    return [list(tensors) for tensors in lists]


def _raise_flag(noop_flag: Tensor, condition: Tensor) -> None:
    """Set the flag to 1 where `condition`, of one element, is true; nothing waits for the device."""
    noop_flag.masked_fill_(condition.reshape(noop_flag.shape) != 0, 1)
