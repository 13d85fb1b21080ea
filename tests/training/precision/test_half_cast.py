"""Casting what goes into and comes out of a model, for all `half` arms."""

import copy
import io
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ampcompare.training.precision.half import cast_model


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
def test_everything_that_floats_is_cast(dtype: torch.dtype) -> None:
    """Tensors by place, by name and inside of collections; integers, numbers and words stay."""
    model = Nested()
    cast_model(model, dtype, bn_fp32=False)
    x, labels = torch.ones(2), torch.arange(2)
    args, kwargs = model(x, [x, (labels, 3)], Pair(x, labels), scale=x, mode="soft")
    assert model.seen == [dtype, dtype]
    assert args[0].dtype is torch.float32
    assert args[1][0].dtype is torch.float32
    assert args[1][1] == (labels, 3) or torch.equal(args[1][1][0], labels)
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


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("twice", [copy.deepcopy, saved_and_loaded])
def test_a_copy_runs_its_own_weights(twice: Any) -> None:
    """A model that was copied or pickled casts, and no longer looks at the weights of the first."""
    model = Scale()
    cast_model(model, torch.float16, bn_fp32=False)
    other = twice(model)
    with torch.no_grad():
        other.weight.fill_(3.0)
    x = torch.full((2,), 1 + 2**-12)
    assert model(x).tolist() == [1.0, 1.0]
    assert other(x).tolist() == [3.0, 3.0]
    assert other(x).dtype is torch.float32


def test_replicas_of_replicas_run_their_own_weights() -> None:
    """What DataParallel makes of a model has a forward of its own, and so has what is made of that."""
    model = Scale()
    cast_model(model, torch.float16, bn_fp32=False)
    replica: Any = model._replicate_for_data_parallel()
    again: Any = replica._replicate_for_data_parallel()
    replica.weight, again.weight = model.weight * 2, model.weight * 3
    x = torch.ones(2)
    assert [each(x).tolist() for each in (model, replica, again)] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_hooks_of_the_user_run_around_the_casts() -> None:
    """A hook sees what the caller gives and gets, in fp32."""
    model = Scale()
    cast_model(model, torch.float16, bn_fp32=False)
    seen: list[torch.dtype] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(torch.ones(2))
    assert seen == [torch.float32, torch.float32]
