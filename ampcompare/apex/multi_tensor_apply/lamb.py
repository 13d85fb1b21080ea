"""The LAMB step over lists of tensors, in the two stages that scripts also call by themselves; fp32 throughout.

Source: Apex 25.05, the mathematics of its `amp_C` LAMB kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompare.apex.multi_tensor_apply.arithmetic import per_tensor_norms
from ampcompare.apex.multi_tensor_apply.fp32_views import as_fp32, to_fp32, write_back
from ampcompare.apex.multi_tensor_apply.per_tensor_scalars import multiply_each
from ampcompare.tensors.lists import copy_by_dtype

__all__ = ["apply_update", "clip_divisor", "compute_update", "lamb"]


def clip_divisor(global_grad_norm: Tensor, max_grad_norm: float | Tensor) -> Tensor:
    """Return what gradients are divided by so that their norm is at most `max_grad_norm`: shape (), fp32, >= 1."""
    norm = global_grad_norm.reshape(())
    limit = max_grad_norm.reshape(()) if isinstance(max_grad_norm, Tensor) else max_grad_norm
    return torch.where(norm > limit, norm / limit, torch.ones_like(norm))


def compute_update(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    divisor: Tensor,
    beta1: float,
    beta2: float,
    grad_averaging: bool,
    step: int | Tensor,
    bias_correction: bool,
    eps: float,
    l2_decay: float = 0.0,
    decoupled_decays: Tensor | float = 0.0,
) -> None:
    """Advance both moments by `grads / divisor` and write the step before scaling into `updates`.

    `updates` may be `grads`. `step` counts from 1: a number or an integer tensor. `decoupled_decays` is one number, or
    a tensor of one for each parameter.
    """
    beta1, beta2 = as_fp32(beta1), as_fp32(beta2)
    correction1 = _bias_correction(beta1, step) if bias_correction else 1.0
    correction2 = _bias_correction(beta2, step) if bias_correction else 1.0
    work_params, work_avgs, work_avg_sqs = to_fp32(params), to_fp32(exp_avgs), to_fp32(exp_avg_sqs)
    scaled = list(torch._foreach_div(to_fp32(grads), divisor))
    if l2_decay != 0.0:
        torch._foreach_add_(scaled, work_params, alpha=l2_decay)
    torch._foreach_mul_(work_avgs, beta1)
    torch._foreach_add_(work_avgs, scaled, alpha=1.0 - beta1 if grad_averaging else 1.0)
    torch._foreach_mul_(work_avg_sqs, beta2)
    torch._foreach_addcmul_(work_avg_sqs, scaled, scaled, 1.0 - beta2)

    denominators = torch._foreach_div(work_avg_sqs, correction2)
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, eps)
    steps = torch._foreach_div(work_avgs, correction1)
    torch._foreach_div_(steps, denominators)
    if isinstance(decoupled_decays, Tensor):
        torch._foreach_add_(steps, multiply_each(work_params, decoupled_decays))
    elif decoupled_decays != 0.0:
        torch._foreach_add_(steps, work_params, alpha=decoupled_decays)
    write_back([*exp_avgs, *exp_avg_sqs], [*work_avgs, *work_avg_sqs])
    copy_by_dtype(updates, steps)


def _bias_correction(beta: float, step: int | Tensor) -> float | Tensor:
    """Return `1 - beta ** step`; in fp64, as fp32 leaves few digits of the difference."""
    if isinstance(step, Tensor):
        return (1.0 - beta ** step.to(torch.float64).reshape(())).to(torch.float32)
    return 1.0 - beta**step


def apply_update(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    param_norms: Tensor,
    update_norms: Tensor,
    *,
    lr: float | Tensor,
    adapt: bool,
    copies: Sequence[Tensor] = (),
) -> None:
    """Subtract `lr * ratio * update`, where `ratio` is ||param|| / ||update|| if `adapt` and both are nonzero, else 1.

    The norms have shape (n,), fp32. `copies` are low-precision model weights that follow `params`.
    """
    work_params = to_fp32(params)
    if adapt:
        usable = (param_norms != 0) & (update_norms != 0)
        rates = lr * torch.where(usable, param_norms / update_norms, torch.ones_like(param_norms))
    else:
        rates = lr * torch.ones_like(param_norms)
    steps = multiply_each(to_fp32(updates), rates)
    torch._foreach_sub_(work_params, steps)
    write_back(params, work_params)
    if copies:
        copy_by_dtype(copies, work_params)


def lamb(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int | Tensor,
    bias_correction: bool,
    weight_decay: float,
    grad_averaging: bool,
    adam_w: bool,
    divisor: Tensor,
    use_nvlamb: bool,
    copies: Sequence[Tensor] = (),
) -> None:
    """Make one LAMB step. As in Apex, `grads` hold the unscaled update afterwards, rounded to their dtype.

    Args:
        lr: a number or an fp32 tensor; likewise `step` (from 1), a number or an integer tensor.
        divisor: shape (), fp32; gradients are divided by it (clipping, and loss scale if they carry one).
        use_nvlamb: adapt the rate without weight decay too.
        copies: low-precision model weights that follow `params`.
    """
    param_norms = per_tensor_norms(params)
    compute_update(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        grads,
        divisor=divisor,
        beta1=beta1,
        beta2=beta2,
        grad_averaging=grad_averaging,
        step=step,
        bias_correction=bias_correction,
        eps=eps,
        l2_decay=0.0 if adam_w else weight_decay,
        decoupled_decays=weight_decay if adam_w else 0.0,
    )
    apply_update(
        params,
        grads,
        param_norms,
        per_tensor_norms(grads),
        lr=lr,
        adapt=use_nvlamb or weight_decay != 0.0,
        copies=copies,
    )
