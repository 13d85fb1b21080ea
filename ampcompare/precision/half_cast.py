"""What every `half` arm does to a model: tensors and inputs in one 16-bit type, outputs in fp32."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

__all__ = ["cast_model", "cast_state"]


def cast_model(model: nn.Module, dtype: torch.dtype, *, bn_fp32: bool) -> None:
    """Cast the parameters and buffers of `model` in place, and from now on its inputs and outputs.

    Args:
        dtype: float16 or bfloat16.
        bn_fp32: keep the weights and statistics of batch norm in fp32.
    """
    model.to(dtype)
    if bn_fp32:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.float()
    _CastForward(model, model.forward, dtype).install()


class _CastForward:
    """Replaces `forward` of one model, at a fraction of the cost of two hooks.

    It refers to one model: copies of the model run their own weights. Replicas of `nn.DataParallel` share what is set
    on the instance, so each of them gets its own replacement.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any], dtype: torch.dtype) -> None:
        self.module = module
        self.original = original
        self.dtype = dtype
        # Twice as fast as `to`, which parses its arguments at each call.
        self.cast = Tensor.half if dtype is torch.float16 else Tensor.bfloat16

    def install(self) -> None:
        """Replace `forward` on this instance of the model."""
        self.module.forward = self
        self.module._replicate_for_data_parallel = self.replicate  # type: ignore[method-assign]

    def replicate(self) -> nn.Module:
        """Return what `nn.Module._replicate_for_data_parallel` returns, with a forward of its own."""
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        original = self.original
        if isinstance(original, MethodType) and original.__self__ is self.module:
            original = MethodType(original.__func__, replica)
        _CastForward(replica, original, self.dtype).install()
        return replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self.dtype
        if len(args) == 1 and not kwargs and args[0].__class__ is Tensor:  # the usual call, without recursion
            value = args[0]
            if value.dtype is not dtype and value.is_floating_point():
                value = self.cast(value)
            output = self.original(value)
        else:
            output = self.original(*_cast(args, dtype), **_cast(kwargs, dtype))
        if output.__class__ is Tensor:
            return output if output.dtype is torch.float32 else output.float()
        return _cast(output, torch.float32)


def _cast_tensor(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return _cast_tensor(value, dtype)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def cast_state(optimizer: Optimizer) -> None:
    """Cast the state of an optimizer, if any, to the current dtypes of its parameters."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())
