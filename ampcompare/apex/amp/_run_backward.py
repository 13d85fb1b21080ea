"""Start a backward pass from a gradient that is known to fit."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from torch.autograd import graph
from torch.overrides import has_torch_function_unary

__all__ = ["run_from"]

_TENSOR_BACKWARD = Tensor.backward
# Torch's own, even where someone had replaced it before this module was imported.
_AUTOGRAD_BACKWARD = inspect.unwrap(torch.autograd.backward)


def run_from(loss: Tensor, seed: Tensor | None) -> None:
    """Back-propagate from a scalar fp32 `loss`, starting with the gradient `seed`, or 1.

    `Tensor.backward` checks shapes, dtypes and options before it calls the function below, at more than what the whole
    overflow check costs. It is called where there is something to check, and where someone replaced it.
    """
    if seed is None:
        loss.backward()
    elif (
        Tensor.backward is not _TENSOR_BACKWARD
        or torch.autograd.backward is not _AUTOGRAD_BACKWARD
        or loss._backward_hooks is not None
        or has_torch_function_unary(loss)
        or torch._C._are_functorch_transforms_active()
    ):
        loss.backward(seed.clone())  # a hook may change it in place
    else:
        graph._engine_run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
