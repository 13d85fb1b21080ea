"""Functions that a script decorates or registers for O1's casts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampcompare.apex import amp
from tests.apex.amp.o1_dtypes import FLOAT, HALF


def test_decorators() -> None:
    """Decorated functions cast while O1 is on and are plain otherwise."""
    seen: list[torch.dtype] = []

    @amp.half_function
    def to_half(x: torch.Tensor) -> None:
        seen.append(x.dtype)

    @amp.float_function
    def to_float(x: torch.Tensor) -> None:
        seen.append(x.dtype)

    @amp.promote_function
    def widest(x: torch.Tensor, y: torch.Tensor) -> None:
        seen.extend([x.dtype, y.dtype])

    def call() -> list[torch.dtype]:
        seen.clear()
        to_half(torch.ones(1))
        to_float(torch.ones(1).half())
        widest(torch.ones(1), torch.ones(1).half())
        return list(seen)

    plain = [FLOAT, HALF, FLOAT, HALF]
    assert to_half.__name__ == "to_half"
    assert call() == plain
    amp.init()
    assert call() == [HALF, FLOAT, FLOAT, FLOAT]
    with amp.disable_casts():
        assert call() == plain
    with pytest.raises(NotImplementedError):
        widest(torch.ones(1), torch.ones(1).double())


def test_decorated_autograd_functions(handle: Any) -> None:
    """Decorators work on static forward and backward methods of autograd functions."""

    class Double(torch.autograd.Function):
        @staticmethod
        @amp.half_function
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @amp.float_function
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            assert grad.dtype == FLOAT
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    y = Double.apply(x)
    assert y.dtype == HALF
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_registered_functions() -> None:
    """Registered functions are wrapped by the next init; a missing name is a ValueError."""
    with pytest.raises(ValueError, match="nonsense"):
        amp.register_half_function(torch, "nonsense")
    amp.register_half_function(torch, "einsum")
    amp.register_float_function(torch, "sigmoid")
    amp.register_promote_function(torch, "where")
    amp.init()
    h, f = torch.ones(2).half(), torch.ones(2)
    assert torch.sigmoid(h).dtype == FLOAT
    assert torch.where(f > 0, h, f).dtype == FLOAT
    assert torch.einsum("i,i->i", f, f).dtype == HALF


def test_a_registered_function_that_is_also_listed() -> None:
    """A user's float registration of a half function computes in float on rounded arguments, as in Apex."""
    amp.register_float_function(torch, "mm")
    amp.init()
    x = torch.full((1, 1), 1.0001)
    result = torch.mm(x, torch.ones(1, 1))
    assert result.dtype == FLOAT
    assert result.item() == 1.0


def test_a_registered_class_stays_a_class() -> None:
    amp.register_float_function(nn, "MaxPool2d")
    amp.init()
    assert isinstance(nn.MaxPool2d(2), nn.MaxPool2d)
    assert nn.MaxPool2d(2)(torch.ones(1, 1, 2, 2)).shape == (1, 1, 1, 1)


def test_lists_are_live() -> None:
    """Names removed from a list before init are not cast."""
    names = amp.lists.functional_overrides.FP32_FUNCS
    names.remove("softmax")
    try:
        amp.init()
        assert F.softmax(torch.ones(2).half(), dim=0).dtype == HALF
    finally:
        names.append("softmax")
