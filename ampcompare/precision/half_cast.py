"""What every `half` arm does to a model: its tensors in one 16-bit type, inputs cast on the way in, outputs to fp32."""

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
    """Cast the parameters and buffers of `model` in place, and what it is called with and returns from now on.

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
    """Stands as `forward` of one model, which costs a fraction of two hooks on it.

    It holds the model that it serves: copies run their own weights, and replicas of `nn.DataParallel`, which share what
    is set on the instance, get one each.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any], dtype: torch.dtype) -> None:
        self.module = module
        self.original = original
        self.dtype = dtype

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
        if len(args) == 1 and not kwargs and args[0].__class__ is Tensor:  # the usual call, without a walk
            value = args[0]
            output = self.original(value.to(dtype) if value.is_floating_point() else value)
        else:
            output = self.original(*_cast(args, dtype), **_cast(kwargs, dtype))
        return output.float() if output.__class__ is Tensor else _cast(output, torch.float32)


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
    """Give the state of an optimizer, where it has any, the dtypes that its parameters have now."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())
