"""Apex's operations that make a step of LAMB, whole or in stages; for their arguments see `ampcompare.apex.amp_C`."""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompare.apex.multi_tensor_apply import lamb as lamb_stages
from ampcompare.apex.multi_tensor_apply.validate import TensorLists, checked

__all__ = [
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
]


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
    lamb_stages.lamb(
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
        divisor=lamb_stages.clip_divisor(global_grad_norm, max_grad_norm),
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
    lamb_stages.lamb(
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
        divisor=lamb_stages.clip_divisor(global_grad_norm, max_grad_norm) / inv_scale.reshape(()),
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
    lamb_stages.compute_update(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        updates,
        divisor=lamb_stages.clip_divisor(global_grad_norm, max_global_grad_norm),
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
    lamb_stages.apply_update(
        params,
        updates,
        per_tensor_param_norm,
        per_tensor_update_norm,
        lr=lr,
        adapt=bool(use_nvlamb) or weight_decay != 0.0,
    )
