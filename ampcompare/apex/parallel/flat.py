"""The functions on flattened lists of tensors that scripts import from `apex.parallel.distributed`.

Source: Apex 25.05, `apex.parallel.distributed`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompare.apex.apex_C import flatten, unflatten

from ._replicas import flat_dist_call

__all__ = [
    "apply_flat_dist_call",
    "extract_tensors",
    "flatten",
    "split_by_type",
    "split_half_float_double",
    "unflatten",
]


def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run a collective on `bucket`, tensors of one type, in place as one vector; an all-reduce becomes an average."""
    flat_dist_call(bucket, call, extra_args)


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Append the tensors in `maybe_tensor`, a tensor or nested iterables of tensors, to `tensor_list`."""
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
        return
    if not isinstance(maybe_tensor, (str, bytes)):
        try:
            items = iter(maybe_tensor)
        except TypeError:
            return
        for item in items:
            extract_tensors(item, tensor_list)


def split_by_type(tensors: Iterable[Tensor]) -> OrderedDict[str, list[Tensor]]:
    """Group tensors by their type string, in the order of first appearance."""
    groups: OrderedDict[str, list[Tensor]] = OrderedDict()
    for tensor in tensors:
        groups.setdefault(tensor.type(), []).append(tensor)
    return groups


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the fp16, the fp32 and the fp64 tensors, on any device; kinds that are missing are left out."""
    tensor_list = list(tensors)
    groups = [[t for t in tensor_list if t.dtype is kind] for kind in (torch.float16, torch.float32, torch.float64)]
    return [group for group in groups if group]
