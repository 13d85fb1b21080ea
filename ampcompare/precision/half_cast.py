"""What every `half` arm does to a model: its tensors in one 16-bit type, inputs cast on the way in, outputs to fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["cast_model"]


def cast_model(model: nn.Module, dtype: torch.dtype, *, bn_fp32: bool) -> None:
    """Cast the parameters and buffers of `model` in place, and what it is called with and returns, by hooks.

    Args:
        dtype: float16 or bfloat16.
        bn_fp32: keep the weights and statistics of batch norm in fp32.
    """
    model.to(dtype)
    if bn_fp32:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.float()

    def cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if len(args) == 1 and isinstance(args[0], Tensor):  # the usual call, without a walk
            args = (_cast_tensor(args[0], dtype),)
        else:
            args = _cast(args, dtype)
        return args, _cast(kwargs, dtype) if kwargs else kwargs

    model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    model.register_forward_hook(_cast_outputs)


def _cast_outputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) else _cast(output, torch.float32)


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
