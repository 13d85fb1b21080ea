"""Manual `.half()`: 16-bit weights, gradients and optimizer state, as scripts without any amp do it.

There are no master weights and there is no overflow check: small updates round to nothing, and infinities reach the
weights. That is what this arm is there to show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ampcompare.precision.base import Precision, StepOutcome, all_applied, owned_params, refuse_wrapped

__all__ = ["Half"]


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


class Half(Precision):
    """The whole model in one 16-bit type; inputs are cast on the way in, outputs to fp32 on the way out.

    Args:
        dtype: float16 or bfloat16.
        bn_fp32: keep the weights and statistics of batch norm in fp32.
        loss_scale: static factor on the loss, divided out of the gradients once per step; None for none.
    """

    key = "precision"

    def __init__(
        self,
        *,
        device: str = "cpu",
        dtype: str = "float16",
        bn_fp32: bool = False,
        loss_scale: float | None = None,
    ) -> None:
        self.half_dtype: torch.dtype = getattr(torch, dtype)
        self.bn_fp32 = bn_fp32
        self.loss_scale = loss_scale
        self._null: AbstractContextManager[None] = nullcontext()
        self._scales: tuple[float, ...] = () if loss_scale is None else (loss_scale,)
        self._unscaled: set[int] = set()

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        refuse_wrapped(models)
        for model in models:
            model.to(self.half_dtype)
            if self.bn_fp32:
                for module in model.modules():
                    if isinstance(module, _BatchNorm):
                        module.float()
            model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
            model.register_forward_hook(self._cast_outputs)
        for optimizer in optimizers:
            if optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())  # casts the state to its parameters' new dtype
        return list(models), list(optimizers)

    def _cast_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if len(args) == 1 and isinstance(args[0], Tensor):  # the usual call, without a walk
            args = (_cast_tensor(args[0], self.half_dtype),)
        else:
            args = _cast(args, self.half_dtype)
        return args, _cast(kwargs, self.half_dtype) if kwargs else kwargs

    @staticmethod
    def _cast_outputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output.float() if isinstance(output, Tensor) else _cast(output, torch.float32)

    def autocast(self) -> AbstractContextManager[None]:
        return self._null

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        return nullcontext(loss if self.loss_scale is None else loss * self.loss_scale)

    def backward(self, loss: Tensor, optimizers: Sequence[Optimizer], **options: Any) -> None:
        (loss if self.loss_scale is None else loss * self.loss_scale).backward()

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        params = owned_params(optimizer)
        if self.loss_scale is not None and id(optimizer) not in self._unscaled:
            grads = [param.grad for param in params if param.grad is not None]
            if grads:
                torch._foreach_div_(grads, self.loss_scale)
            self._unscaled.add(id(optimizer))
        return params

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        for optimizer in optimizers:
            if self.loss_scale is not None:
                self.unscale(optimizer)
            optimizer.step()
        self._unscaled.clear()
        return all_applied(len(optimizers), self._scales)

    def loss_scales(self) -> tuple[float, ...]:
        return self._scales

    def state_dict(self) -> dict[str, Any]:
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "loss_scale" in state:
            self.loss_scale = float(state["loss_scale"])
            self._scales = (self.loss_scale,)
