"""The first difference of two states, by name."""

import math
from typing import Any

import pytest
import torch

from ampcompare.base.tensors.tree import first_difference

ONE: dict[str, Any] = {"model": {"weight": torch.tensor([1.0, 0.0])}, "steps": [1, (2.5, None)], "name": "a"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({**ONE}, ""),
        ({**ONE, "name": "b"}, "name is 'a', then 'b'"),
        ({**ONE, "more": 1}, "more is only in the second"),
        ({"model": ONE["model"], "steps": ONE["steps"]}, "name is only in the first"),
        ({**ONE, "steps": [1, (3.5, None)]}, "steps.1.0 is 2.5, then 3.5"),
        ({**ONE, "steps": [1]}, "steps has 2 entries, then 1"),
        (
            {**ONE, "model": {"weight": torch.tensor([1.0, -0.0])}},
            "model.weight differs in 1 of 2 elements, first in 1: 0.0, then -0.0",
        ),
        (
            {**ONE, "model": {"weight": torch.tensor([1.0, 0.0]).half()}},
            "model.weight has dtype torch.float32, then torch.float16",
        ),
        (
            {**ONE, "model": {"weight": torch.zeros(2, 1)}},
            "model.weight has shape torch.Size([2]), then torch.Size([2, 1])",
        ),
    ],
)
def test_the_first_difference_is_named(other: dict[str, Any], said: str) -> None:
    """Values, kinds, lengths and single bits of a tensor, by their place."""
    assert first_difference(ONE, other) == said


def test_nan_equals_nan_and_what_is_set_apart_is_not_looked_at() -> None:
    """A NaN is a result like any other; keys set apart may differ or be missing at any depth."""
    nan = torch.tensor([math.nan])
    assert first_difference({"a": math.nan, "b": nan}, {"a": math.nan, "b": nan.clone()}) == ""
    assert first_difference({"x": [{"seconds": 1}]}, {"x": [{"seconds": 2}], "seconds": 3}, apart=("seconds",)) == ""
