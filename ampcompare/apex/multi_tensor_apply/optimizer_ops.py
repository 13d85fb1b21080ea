"""Apex's operations that step an optimizer other than LAMB; for their arguments see `ampcompare.apex.amp_C`."""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompare.apex.multi_tensor_apply import optimizer_math
from ampcompare.apex.multi_tensor_apply.scaling_ops import TensorLists, checked

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_sgd",
]


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """[grads, params, momentum buffers(, model copies)]: one SGD step; none if the flag is set.

    The host reads the flag, and waits for it, only where more than torch's fused kernel is to be held back.
    """
    grads, params, buffers, *rest = checked(tensor_lists, noop_flag, 3, 4)
    beyond_kernel = rest or (wd_after_momentum and weight_decay != 0.0)
    if (beyond_kernel or not noop_flag.is_cuda) and noop_flag.item():
        return
    optimizer_math.sgd(
        grads,
        params,
        buffers,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        first_run=first_run,
        wd_after_momentum=wd_after_momentum,
        scale=scale,
        found_inf=(noop_flag != 0).to(torch.float32).reshape(()) if noop_flag.is_cuda else None,
        copies=rest[0] if rest else (),
    )


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """[grads, params, first moments, second moments]: one Adam step, `mode` 0 with L2 decay, 1 as AdamW."""
    grads, params, exp_avgs, exp_avg_sqs = checked(tensor_lists, noop_flag, 4)
    optimizer_math.adam(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        adam_w=mode == 1,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
    )


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """As `multi_tensor_adam` with `lr`, `step` and `inv_scale` on the device; gradients come back unscaled.

    A fifth list holds fp32 masters of the second: they are updated, and the model parameters follow. Where the flag is
    set nothing changes.
    """
    grads, params, exp_avgs, exp_avg_sqs, *rest = checked(tensor_lists, noop_flag, 4, 5)
    optimizer_math.adam(
        grads,
        rest[0] if rest else params,
        exp_avgs,
        exp_avg_sqs,
        lr=lr.reshape(()),
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        adam_w=mode == 1,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        grad_scale=inv_scale.to(torch.float32).reshape(()).reciprocal(),
        found_inf=(noop_flag != 0).to(torch.float32).reshape(()),
        copies=params if rest else (),
    )


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """[grads, params, sums of squares]: one Adagrad step, `mode` 0 with L2 decay, 1 with decoupled decay."""
    grads, params, sums = checked(tensor_lists, noop_flag, 3)
    optimizer_math.adagrad(grads, params, sums, lr=lr, eps=epsilon, adagrad_w=mode == 1, weight_decay=weight_decay)


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """[grads, params, moments]: one NovoGrad step, `mode` 0 with the norm inside the moment; `norm_type` 2 or 0."""
    grads, params, exp_avgs = checked(tensor_lists, noop_flag, 3)
    optimizer_math.novograd(
        grads,
        params,
        exp_avgs,
        grad_norms,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        grad_averaging=bool(grad_averaging),
        reg_inside_moment=mode == 0,
        max_norm=norm_type == 0,
    )


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = None,
) -> None:
    """[grads, params, first moments, second moments]: one LAMB step; the gradients hold the update afterwards."""
    grads, params, exp_avgs, exp_avg_sqs = checked(tensor_lists, noop_flag, 4)
    optimizer_math.lamb(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        grad_averaging=bool(grad_averaging),
        adam_w=mode == 1,
        divisor=optimizer_math.clip_divisor(global_grad_norm, max_grad_norm),
        use_nvlamb=bool(use_nvlamb),
    )


@torch.no_grad()
def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor,
    use_nvlamb: bool | None,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """As `multi_tensor_lamb`, with tensors for numbers; a fifth list holds low-precision copies of the parameters.

    Gradients and `global_grad_norm` carry the loss scale, and so does `max_grad_norm`. Nothing changes where the flag
    is set, which the host reads.
    """
    grads, params, exp_avgs, exp_avg_sqs, *rest = checked(tensor_lists, noop_flag, 4, 5)
    if noop_flag.item():
        return
    optimizer_math.lamb(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lr=lr.reshape(()),
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        grad_averaging=bool(grad_averaging),
        adam_w=mode == 1,
        divisor=optimizer_math.clip_divisor(global_grad_norm, max_grad_norm) / inv_scale.reshape(()),
        use_nvlamb=bool(use_nvlamb),
        copies=rest[0] if rest else (),
    )


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: Tensor,
    max_global_grad_norm: float,
) -> None:
    """[grads, params, first moments, second moments, updates]: moments and updates; `step` counts from 0."""
    grads, params, exp_avgs, exp_avg_sqs, updates = checked(tensor_lists, noop_flag, 5)
    optimizer_math.compute_update(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        updates,
        divisor=optimizer_math.clip_divisor(global_grad_norm, max_global_grad_norm),
        beta1=beta1,
        beta2=beta2,
        grad_averaging=True,
        step=step + 1,
        bias_correction=True,
        eps=epsilon,
        decoupled_decays=per_tensor_decay.to(params[0].device, torch.float32),
    )


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None = None,
) -> None:
    """[params, updates]: subtract the updates, each scaled by ||param|| / ||update|| where that applies."""
    params, updates = checked(tensor_lists, noop_flag, 2)
    optimizer_math.apply_update(
        params,
        updates,
        per_tensor_param_norm,
        per_tensor_update_norm,
        lr=lr,
        adapt=bool(use_nvlamb) or weight_decay != 0.0,
    )
