"""How the optimizers of 2018 take gradients and outputs from their caller: one list, or a list for each group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["TensorGroups", "per_group"]

TensorGroups = Iterable[Tensor] | Sequence[Sequence[Tensor | None]]


def per_group(tensors: Any, groups: Sequence[dict[str, Any]], name: str) -> list[list[Tensor | None]]:
    """Return a list of tensors, or of None, for each group, as long as the group.

    Args:
        tensors: None, tensors in any iterable (they belong to a single group), or a list of lists.

    Raises:
        RuntimeError: another number of groups or of tensors.
    """
    sizes = [len(group["params"]) for group in groups]
    if tensors is None:
        return [[None] * size for size in sizes]
    rows = list(tensors)
    lists = [list(row) for row in rows] if rows and isinstance(rows[0], list) else [rows]
    lengths = [len(row) for row in lists]
    if lengths != sizes:
        raise RuntimeError(f"step got {name} for groups of {lengths} tensors; the optimizer has groups of {sizes}")
    return lists
