"""Tensors of a class of their own as dictionaries of plain ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampcompare.base.tensors.tree import tensors_in
from ampcompare.training.checkpoint.state.flattened import flatten_tensor, is_wrapped, plain_state, rebuild_tensor


class Pair(Tensor):
    """A sum of two tensors, of which either may be of another class."""

    def __new__(cls, high: Tensor, low: Tensor, note: str) -> Pair:
        return Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, high: Tensor, low: Tensor, note: str) -> None:
        self.high, self.low, self.note = high, low, note

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["high", "low"], [self.note]

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], attributes: Any, shape: Any, stride: Any) -> Pair:
        return Pair(inner["high"], inner["low"], *attributes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called on the whole")


NAME = f"{Pair.__module__}.Pair"


def test_a_tensor_within_another_is_flattened_and_built_again() -> None:
    """Both ways nothing is copied and nothing is computed; the class is found by its name among those given."""
    high, low = torch.ones(2, 3), torch.zeros(2, 3)
    tensor = Pair(high, Pair(low, high, "inner"), "outer")
    saved = flatten_tensor(tensor)
    assert is_wrapped(tensor)
    assert not is_wrapped(high)
    assert (saved["tensor_class"], saved["shape"], saved["stride"]) == (NAME, torch.Size([2, 3]), (3, 1))
    assert [inner is each for inner, each in zip(tensors_in(saved), (high, low, high), strict=True)] == [True] * 3
    again = rebuild_tensor(saved)
    assert isinstance(again, Pair)
    assert (again.high is high, again.low.high is low, again.low.note) == (True, True, "inner")  # type: ignore[attr-defined]


def test_plain_state_of_an_optimizer_is_passed_on() -> None:
    """Without such tensors the state dict itself comes back; with one, all else in it is what it was."""
    plain = {"state": {0: {"step": 3, "moment": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}
    assert plain_state(plain) is plain
    pair = Pair(torch.ones(2), torch.zeros(2), "x")
    state = plain_state({**plain, "state": {0: {**plain["state"][0], "pair": pair}}})  # type: ignore[index]
    assert state["param_groups"] is plain["param_groups"]
    assert state["state"][0]["moment"] is plain["state"][0]["moment"]  # type: ignore[index]
    assert state["state"][0]["pair"]["tensor_class"] == NAME
