"""Batches of any structure: tensors in tuples, lists and dicts, whose first dimension is the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = ["channels_last", "in_fp32", "map_tensors", "split", "tensors_of"]


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, in the order of its structure."""
    yield from (leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return a batch of the same structure, with `function` applied to each tensor."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def split(batch: Any, count: int) -> Sequence[Any]:
    """Return `count` batches of equal size with the structure of `batch`; what is not a tensor is in each of them."""
    leaves, structure = tree_flatten(batch)
    size = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor)) // count
    parts = [leaf.split(size) if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves]
    return [tree_unflatten([part[place] for part in parts], structure) for place in range(count)]


def channels_last(batch: Any) -> Any:
    """Return a batch with its tensors of rank four (N, C, H, W) in channels-last format."""
    return map_tensors(_channels_last, batch)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def in_fp32(outputs: Any) -> Any:
    """Return outputs with 16-bit floating-point tensors cast to float32."""
    return map_tensors(_in_fp32, outputs)


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
