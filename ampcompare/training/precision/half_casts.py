"""Cast a whole model to a 16-bit type, with its inputs and outputs, as `model.half()` in a script does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampcompare.base.tensors.tree import cast_floating_tensors
from ampcompare.training.precision.replaced_forward import ReplacedForward

CASTS = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16, torch.float64: Tensor.double}
OF_MODULE = {
    torch.float16: nn.Module.half,
    torch.bfloat16: nn.Module.bfloat16,
    torch.float64: nn.Module.double,
}


def cast_model_with_inputs_outputs(model: nn.Module, dtype: torch.dtype, *, bn_fp32: bool) -> None:
    """Cast the parameters and buffers of `model` in place, and from now on its inputs and outputs.

    Float64 is for an evaluation. `bn_fp32` keeps the weights and statistics of batch norm in fp32.
    """
    cast_weights(model, dtype, bn_fp32=bn_fp32)
    _CastForward(model, model.forward, dtype).install()


def cast_weights(model: nn.Module, dtype: torch.dtype, *, bn_fp32: bool) -> None:
    """Cast the parameters and buffers of `model` in place; the arguments are those of `cast_model_with_inputs_outputs`.

    Complex ones stay as they are, as under `model.half()`: `model.to(dtype)` would leave their real parts alone.
    """
    OF_MODULE[dtype](model)
    if bn_fp32:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.float()
    # what a script has set by `grad_dtype` of torch 2.13 is the arm's to decide
    for param in model.parameters():
        if getattr(param, "grad_dtype", param.dtype) is not param.dtype:
            param.grad_dtype = param.dtype


class _CastForward(ReplacedForward):
    """Casts what goes into a model to one floating type, and what comes out to fp32."""

    def __init__(self, module: nn.Module, original: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__(module, original)
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self.dtype
        if len(args) == 1 and not kwargs and args[0].__class__ is Tensor:  # the usual call, without recursion
            value = args[0]
            if value.dtype is not dtype and value.is_floating_point():
                value = CASTS[dtype](value)  # twice as fast as `to`, which parses its arguments at each call
            output = self.original(value)
        else:
            output = self.original(
                *cast_floating_tensors(args, dtype), **cast_floating_tensors(kwargs, dtype)
            )
        if output.__class__ is Tensor:
            return output if output.dtype is torch.float32 else output.float()
        return cast_floating_tensors(output, torch.float32)
