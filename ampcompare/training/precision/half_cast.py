"""What every `half` arm does to a model: tensors and inputs in one 16-bit type, outputs in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ampcompare.base.tensors.tree import cast_floating
from ampcompare.training.precision.replaced_forward import ReplacedForward

__all__ = ["cast_model", "cast_state", "cast_weights"]

CASTS = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16, torch.float64: Tensor.double}


def cast_model(model: nn.Module, dtype: torch.dtype, *, bn_fp32: bool) -> None:
    """Cast the parameters and buffers of `model` in place, and from now on its inputs and outputs.

    Args:
        dtype: float16 or bfloat16; float64 for an evaluation.
        bn_fp32: keep the weights and statistics of batch norm in fp32.
    """
    cast_weights(model, dtype, bn_fp32=bn_fp32)
    _CastForward(model, model.forward, dtype).install()


def cast_weights(model: nn.Module, dtype: torch.dtype, *, bn_fp32: bool) -> None:
    """Cast the parameters and buffers of `model` in place; the arguments are those of `cast_model`."""
    model.to(dtype)
    if bn_fp32:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.float()


class _CastForward(ReplacedForward):
    """Casts what goes into a model to one floating type, and what comes out to fp32."""

    def __init__(self, module: nn.Module, original: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__(module, original)
        self.dtype = dtype
        # Twice as fast as `to`, which parses its arguments at each call.
        self.cast = CASTS[dtype]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self.dtype
        if len(args) == 1 and not kwargs and args[0].__class__ is Tensor:  # the usual call, without recursion
            value = args[0]
            if value.dtype is not dtype and value.is_floating_point():
                value = self.cast(value)
            output = self.original(value)
        else:
            output = self.original(*cast_floating(args, dtype), **cast_floating(kwargs, dtype))
        if output.__class__ is Tensor:
            return output if output.dtype is torch.float32 else output.float()
        return cast_floating(output, torch.float32)


def cast_state(optimizer: Optimizer) -> None:
    """Cast the state of an optimizer, if any, to the current dtypes of its parameters."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())
