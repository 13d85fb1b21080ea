"""Enter autograd below its checks: start a backward pass from a valid gradient, and switch recording off."""

from __future__ import annotations

import inspect
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd import graph
from torch.overrides import has_torch_function_unary

__all__ = ["GradientsOff", "run_from"]

_TENSOR_BACKWARD = Tensor.backward
# Torch's own function, even if it was replaced before this module was imported.
_AUTOGRAD_BACKWARD = inspect.unwrap(torch.autograd.backward)


def run_from(loss: Tensor, initial_grad: Tensor | None) -> None:
    """Back-propagate from a scalar fp32 `loss`, starting with the gradient `initial_grad`, or 1.

    `Tensor.backward` checks shapes, dtypes and options before it calls the function below, which costs more than the
    whole overflow check. It is called if there is something to check, or if it was replaced.
    """
    if initial_grad is None:
        loss.backward()
    elif (
        Tensor.backward is not _TENSOR_BACKWARD
        or torch.autograd.backward is not _AUTOGRAD_BACKWARD
        or loss._backward_hooks is not None
        or has_torch_function_unary(loss)
        or torch._C._are_functorch_transforms_active()
    ):
        loss.backward(initial_grad.clone())  # a hook may change it in place
    else:
        graph._engine_run_backward(
            (loss,), (initial_grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


_is_enabled = torch.is_grad_enabled
_set_enabled = torch._C._set_grad_enabled  # what `torch.no_grad` calls too


class GradientsOff:
    """Run a block without recording operations.

    It costs a quarter of `torch.no_grad()`, and amp needs it in every step.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _is_enabled()
        _set_enabled(False)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _set_enabled(self._before)
