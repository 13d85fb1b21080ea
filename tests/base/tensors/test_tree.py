"""Tests of tensors inside containers."""

import dataclasses
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch

from ampcompare.base.tensors.tree import cast_floating, first_floating_type, map_tree, tensors_in

Pair = namedtuple("Pair", ["left", "right"])
A, B = torch.ones(1), torch.ones(2, dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class Batch:
    """What some scripts pass to a model."""

    left: Any
    right: Any
    rest: Any = dataclasses.field(default="text", init=False)


@pytest.mark.parametrize(
    "value", [(A, B), [A, [B]], {"a": A, "b": (B, "text")}, Pair(A, {"b": B}), UserDict(a=A, b=B), Batch(A, [B])]
)
def test_tensors_come_in_order(value: Any) -> None:
    assert [id(tensor) for tensor in tensors_in(value)] == [id(A), id(B)]


def test_containers_keep_their_types() -> None:
    """Only tensors change; named tuples, lists and other values stay what they are."""
    changed = map_tree(Pair([A], {"b": B, "c": "text"}), lambda tensor: tensor + 1)
    assert isinstance(changed, Pair)
    batch = map_tree(Batch(A, [B]), lambda tensor: tensor + 1)
    assert isinstance(batch, Batch)
    assert (batch.left.item(), batch.right[0].tolist(), batch.rest) == (2, [2, 2], "text")
    assert (changed.left[0].item(), changed.right["b"].tolist(), changed.right["c"]) == (2, [2, 2], "text")


def test_only_floating_tensors_are_cast() -> None:
    half = cast_floating([B, A], torch.float16)
    assert [tensor.dtype for tensor in half] == [torch.int64, torch.float16]
    assert first_floating_type(half) is torch.float16
    assert first_floating_type([B, "text"]) is None
