"""Casting what goes into and comes out of a model, for all `half` arms."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ampcompare.training.precision.half_casts import cast_model_with_inputs_outputs
from ampcompare.training.precision.stepped_weights import Fp32CopiesPerStep, MasterWeights


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Nested(nn.Module):
    """Gives back what it is called with, and notes the types that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: list[torch.dtype] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen += [value.dtype for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return args[0] if len(args) == 1 and not kwargs else (args, kwargs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("masters", [False, True])
def test_complex_weights_and_buffers_stay(dtype: torch.dtype, masters: bool) -> None:
    """As under `model.half()`: what has an imaginary part is no number of 16 bits, nor has it an fp32 master."""
    model = nn.Linear(2, 2)
    model.wave = nn.Parameter(torch.full((2,), 1 + 2j))
    model.register_buffer("turn", torch.full((2,), 3j))
    cast_model_with_inputs_outputs(model, dtype, bn_fp32=False)
    assert (model.weight.dtype, model.wave.dtype, model.turn.dtype) == (dtype, *[torch.complex64] * 2)
    assert model.turn.tolist() == [3j, 3j]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    stepped = MasterWeights(optimizer) if masters else Fp32CopiesPerStep(optimizer, kahan=True)
    model.wave.grad = torch.full((2,), 1j)
    stepped.take_gradients_from_model()
    optimizer.step()
    stepped.give_weights_to_model()
    assert model.wave.tolist() == [1 + 1j, 1 + 1j]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_everything_that_floats_is_cast(dtype: torch.dtype) -> None:
    """Tensors by place, by name and inside of collections; integers, numbers and words stay."""
    model = Nested()
    cast_model_with_inputs_outputs(model, dtype, bn_fp32=False)
    x, labels = torch.ones(2), torch.arange(2)
    args, kwargs = model(x, [x, (labels, 3)], Pair(x, labels), scale=x, mode="soft")
    assert model.seen == [dtype, dtype]
    assert args[0].dtype is torch.float32
    assert args[1][0].dtype is torch.float32
    assert args[1][1] == (labels, 3)
    assert isinstance(args[2], Pair)
    assert (args[2].left.dtype, args[2].right.dtype) == (torch.float32, torch.int64)
    assert (kwargs["scale"].dtype, kwargs["mode"]) == (torch.float32, "soft")
    assert model(labels).dtype is torch.float32  # outputs are cast whatever they are


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_hooks_of_the_user_run_around_the_casts() -> None:
    """A hook sees what the caller gives and gets, in fp32."""
    model = Scale()
    cast_model_with_inputs_outputs(model, torch.float16, bn_fp32=False)
    seen: list[torch.dtype] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(torch.ones(2))
    assert seen == [torch.float32, torch.float32]
