"""Optimizer steps over lists of tensors: Adam, SGD, Adagrad, NovoGrad and LAMB, computed in fp32 whatever the dtypes.

Parameters, state and (where said) gradients are updated in place and rounded to their own dtypes at the end. Numbers
come in the order of `amp_C`.
Source: Apex 25.05, the mathematics of its `amp_C` kernels.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompare.apex.multi_tensor_apply.arithmetic import (
    as_fp32_tensors,
    copy_into_targets,
    divide_each,
    fp32_lists_laid_out_alike,
    multiply_each,
    per_tensor_norms,
    rounded_to_fp32,
)
from ampcompare.base.tensors.lists import copy_tensors_by_dtype


def make_adam_step(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int | Tensor,
    adam_w: bool | int,
    bias_correction: bool | int,
    weight_decay: float,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    copies: Sequence[Tensor] = (),
) -> None:
    """Make one Adam step (`adam_w`: decoupled decay, else L2) with torch's fused kernel.

    Args:
        lr: a number, or an fp32 tensor on the device of the parameters.
        step: number of this step, from 1; an integer tensor keeps the host out of it.
        grad_scale: fp32 scalar; gradients are divided by it and written back.
        found_inf: fp32 scalar; where it is 1 nothing at all is changed.
        copies: low-precision model weights that follow `params`.
    """
    beta1, beta2 = rounded_to_fp32(beta1), rounded_to_fp32(beta2)
    work_grads, work_params, work_avgs, work_avg_sqs = fp32_lists_laid_out_alike(
        grads, params, exp_avgs, exp_avg_sqs
    )
    device = params[0].device
    if not bias_correction:
        # beta ** inf is 0, so both corrections become exactly 1.
        steps = torch.full((), math.inf, dtype=torch.float32, device=device)
    elif isinstance(step, Tensor):
        steps = step.to(device=device, dtype=torch.float32).reshape(())
    else:
        steps = torch.full((), float(step), dtype=torch.float32, device=device)
    kernel = torch._fused_adamw_ if adam_w else torch._fused_adam_
    kernel(
        work_params,
        work_grads,
        work_avgs,
        work_avg_sqs,
        [],
        [steps] * len(work_params),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )
    copy_into_targets([*params, *exp_avgs, *exp_avg_sqs], [*work_params, *work_avgs, *work_avg_sqs])
    if grad_scale is not None:
        copy_into_targets(grads, work_grads)
    if copies:
        copy_tensors_by_dtype(copies, work_params)


def make_sgd_step(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float | Tensor,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
    *,
    found_inf: Tensor | None = None,
    copies: Sequence[Tensor] = (),
) -> None:
    """Make one SGD step with torch's fused kernel; gradients are read, multiplied by `scale`, and not written.

    Args:
        found_inf: fp32 scalar; where it is 1 the kernel changes nothing (not with `wd_after_momentum` or `copies`).
        first_run: set every momentum buffer to its gradient instead of averaging; `dampening` then has no part.
        wd_after_momentum: keep weight decay out of the momentum (decoupled decay).
        copies: low-precision model weights that follow `params`.
    """
    work_grads, work_params, work_buffers = fp32_lists_laid_out_alike(grads, params, momentum_buffers)
    if scale != 1.0:
        work_grads = list(torch._foreach_mul(work_grads, scale))
    if wd_after_momentum and weight_decay != 0.0:
        torch._foreach_mul_(work_params, 1.0 - lr * weight_decay)
    torch._fused_sgd_(
        work_params,
        work_grads,
        work_buffers if momentum != 0.0 else [],
        weight_decay=0.0 if wd_after_momentum else weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=rounded_to_fp32(dampening),
        nesterov=nesterov,
        maximize=False,
        is_first_step=first_run and momentum != 0.0,  # the kernel warns if there are no buffers to initialize
        found_inf=found_inf,
    )
    copy_into_targets([*params, *momentum_buffers], [*work_params, *work_buffers])
    if copies:
        copy_tensors_by_dtype(copies, work_params)


def make_adagrad_step(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    lr: float,
    eps: float,
    adagrad_w: bool | int,
    weight_decay: float,
) -> None:
    """Make one Adagrad step without learning-rate decay (`adagrad_w`: decoupled weight decay, else L2)."""
    work_grads = as_fp32_tensors(grads)
    work_params = as_fp32_tensors(params)
    work_sums = as_fp32_tensors(sums)
    if weight_decay != 0.0 and not adagrad_w:
        work_grads = list(torch._foreach_add(work_grads, work_params, alpha=weight_decay))
    torch._foreach_addcmul_(work_sums, work_grads, work_grads, 1.0)
    denominators = torch._foreach_sqrt(work_sums)
    torch._foreach_add_(denominators, eps)
    if adagrad_w:
        torch._foreach_mul_(work_params, 1.0 - lr * weight_decay)
    torch._foreach_addcdiv_(work_params, work_grads, denominators, -lr)
    copy_into_targets([*params, *sums], [*work_params, *work_sums])


def make_novograd_step(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: bool | int,
    weight_decay: float,
    grad_averaging: bool | int,
    moment_mode: int,
    norm_type: int,
) -> None:
    """Make one NovoGrad step; `moment_mode` 0 normalizes and decays before averaging, 1 after.

    `grad_norms` (shape (n,), fp32, updated in place) averages norms, not their squares: under L2 the squares are
    blended and the root is kept, under the max norm (`norm_type` 0) the norms themselves are blended.
    """
    beta1, beta2 = rounded_to_fp32(beta1), rounded_to_fp32(beta2)
    work_grads = as_fp32_tensors(grads)
    work_params = as_fp32_tensors(params)
    work_avgs = as_fp32_tensors(exp_avgs)
    norms = per_tensor_norms(grads, math.inf if norm_type == 0 else 2.0)
    if norm_type == 0:
        grad_norms.mul_(beta2).add_(norms, alpha=1.0 - beta2)
    else:
        grad_norms.copy_((beta2 * grad_norms.square() + (1.0 - beta2) * norms.square()).sqrt())
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = math.sqrt(1.0 - beta2**step) if bias_correction else 1.0
    share = 1.0 - beta1 if grad_averaging else 1.0
    denominators = grad_norms / correction2 + eps

    updates: Sequence[Tensor]
    torch._foreach_mul_(work_avgs, beta1)
    if moment_mode == 0:
        steps = divide_each(work_grads, denominators)
        torch._foreach_add_(steps, work_params, alpha=weight_decay)
        torch._foreach_add_(work_avgs, steps, alpha=share)
        updates = torch._foreach_div(work_avgs, correction1)
    else:
        torch._foreach_add_(work_avgs, work_grads, alpha=share)
        updates = divide_each(torch._foreach_div(work_avgs, correction1), denominators)
        torch._foreach_add_(updates, work_params, alpha=weight_decay)
    torch._foreach_add_(work_params, updates, alpha=-lr)
    copy_into_targets([*params, *exp_avgs], [*work_params, *work_avgs])


def divisor_for_norm_clip(global_grad_norm: Tensor, max_grad_norm: float | Tensor) -> Tensor:
    """Return what gradients are divided by so that their norm is at most `max_grad_norm`: shape (), fp32, >= 1."""
    norm = global_grad_norm.reshape(())
    limit = max_grad_norm.reshape(()) if isinstance(max_grad_norm, Tensor) else max_grad_norm
    return torch.where(norm > limit, norm / limit, torch.ones_like(norm))


def write_lamb_updates(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    divisor: Tensor,
    beta1: float,
    beta2: float,
    grad_averaging: bool | int,
    step: int | Tensor,
    bias_correction: bool | int,
    eps: float,
    l2_decay: float = 0.0,
    decoupled_decays: Tensor | float = 0.0,
) -> None:
    """Advance both moments by `grads / divisor` and write the step before scaling into `updates`.

    `updates` may be `grads`. `step` counts from 1: a number or an integer tensor. `decoupled_decays` is one number, or
    a tensor of one for each parameter.
    """
    beta1, beta2 = rounded_to_fp32(beta1), rounded_to_fp32(beta2)
    correction1 = _bias_correction(beta1, step) if bias_correction else 1.0
    correction2 = _bias_correction(beta2, step) if bias_correction else 1.0
    work_params = as_fp32_tensors(params)
    work_avgs = as_fp32_tensors(exp_avgs)
    work_avg_sqs = as_fp32_tensors(exp_avg_sqs)
    scaled = list(torch._foreach_div(as_fp32_tensors(grads), divisor))
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
    copy_into_targets([*exp_avgs, *exp_avg_sqs], [*work_avgs, *work_avg_sqs])
    copy_tensors_by_dtype(updates, steps)


def _bias_correction(beta: float, step: int | Tensor) -> float | Tensor:
    """Return `1 - beta ** step`; in fp64, as fp32 leaves few digits of the difference."""
    if isinstance(step, Tensor):
        return (1.0 - beta ** step.to(torch.float64).reshape(())).to(torch.float32)
    return 1.0 - beta**step


def apply_lamb_updates(
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
    work_params = as_fp32_tensors(params)
    if adapt:
        usable = (param_norms != 0) & (update_norms != 0)
        rates = lr * torch.where(usable, param_norms / update_norms, torch.ones_like(param_norms))
    else:
        rates = lr * torch.ones_like(param_norms)
    steps = multiply_each(as_fp32_tensors(updates), rates)
    torch._foreach_sub_(work_params, steps)
    copy_into_targets(params, work_params)
    if copies:
        copy_tensors_by_dtype(copies, work_params)


def make_lamb_step(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int | Tensor,
    bias_correction: bool | int,
    weight_decay: float,
    grad_averaging: bool | int,
    adam_w: bool | int,
    divisor: Tensor,
    use_nvlamb: bool | None,
    *,
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
    write_lamb_updates(
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
    apply_lamb_updates(
        params,
        grads,
        param_norms,
        per_tensor_norms(grads),
        lr=lr,
        adapt=bool(use_nvlamb) or weight_decay != 0.0,
        copies=copies,
    )
