"""Start a backward pass from a given gradient, at a fraction of the cost of `Tensor.backward`."""

import inspect

import torch
from torch import Tensor
from torch.autograd import graph
from torch.overrides import has_torch_function_unary

_TENSOR_BACKWARD = Tensor.backward
# Torch's own function, even if it was replaced before this module was imported.
_AUTOGRAD_BACKWARD = inspect.unwrap(torch.autograd.backward)
_ones: dict[torch.device, Tensor] = {}


def run_backward(loss: Tensor, initial_grad: Tensor | None = None) -> None:
    """Back-propagate from `loss`, starting with the gradient `initial_grad`, or 1.

    `Tensor.backward` checks shapes, dtypes and options before it calls the function below, which costs more than an
    overflow check. It is called if there is something to check, or if it was replaced.

    Args:
        loss: of one element; with `initial_grad` a scalar of its dtype.
    """
    is_observed = (
        Tensor.backward is not _TENSOR_BACKWARD
        or torch.autograd.backward is not _AUTOGRAD_BACKWARD
        or loss._backward_hooks is not None
        or has_torch_function_unary(loss)
        or torch._C._are_functorch_transforms_active()
    )
    if is_observed and initial_grad is not None:
        loss.backward(initial_grad.clone())  # a hook may change it in place
    elif is_observed or (initial_grad is None and not _is_plain_fp32_scalar(loss)):
        loss.backward()
    else:
        initial_grads = (_make_one_on_device(loss.device) if initial_grad is None else initial_grad,)
        graph._engine_run_backward(
            (loss,), initial_grads, False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def _is_plain_fp32_scalar(loss: Tensor) -> bool:
    # no fake tensor, for instance
    return loss.__class__ is Tensor and loss.dtype is torch.float32 and not loss.shape


def _make_one_on_device(device: torch.device) -> Tensor:
    one = _ones.get(device)
    if one is None or one._version:  # something has changed it in place
        one = _ones[device] = torch.full((), 1.0, dtype=torch.float32, device=device)
    return one
