"""What every operation on lists of tensors does first and last: check its lists, and raise its flag."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["TensorLists", "checked", "raise_flag"]

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


def raise_flag(noop_flag: Tensor, condition: Tensor) -> None:
    """Set the flag to 1 where `condition`, of one element, is true; nothing waits for the device."""
    noop_flag.masked_fill_(condition.reshape(noop_flag.shape) != 0, 1)
