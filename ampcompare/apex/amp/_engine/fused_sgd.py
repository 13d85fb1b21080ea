"""Leave gradients of FusedSGD half and scaled, for `materialize_master_grads=False`.

The optimizer's kernel divides by `most_recent_scale` itself; masters never get gradients.

Source: Apex 25.05, the FusedSGD paths of `apex/amp/_process_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompare.apex.amp._amp_state import _amp_state
from ampcompare.apex.amp.scaler import LossScaler

from .backward import drop_leftovers, take_grads
from .optimizer_stash import AmpOptimizerState

__all__ = ["is_fused_sgd", "keeps_half_grads", "post_backward", "prepare_backward"]


def is_fused_sgd(optimizer: Any) -> bool:
    """Return whether this is Apex's FusedSGD (by name), which writes the model's half parameters itself."""
    return any(cls.__name__ == "FusedSGD" for cls in type(optimizer).__mro__)


def keeps_half_grads(optimizer: Any) -> bool:
    """Return whether master gradients are never created."""
    return is_fused_sgd(optimizer) and not optimizer.materialize_master_grads


def prepare_backward(optimizer: Any) -> None:
    """Stash the gradients of the model's parameters, including half ones."""
    optimizer._amp_lazy_init()
    stash: AmpOptimizerState = optimizer._amp_stash
    drop_leftovers(stash)
    half = take_grads(stash.all_fp16_params, stash.all_fp16_grad_stash)
    stash.stashed = take_grads(stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash) or half


def post_backward(optimizer: Any, scaler: LossScaler) -> None:
    """Bring new and stashed gradients to one scale, the smaller of theirs, and add them."""
    optimizer._amp_lazy_init()
    stash: AmpOptimizerState = optimizer._amp_stash
    grad_scale = scaler.loss_scale()
    stash_scale = optimizer.most_recent_scale
    out_scale = grad_scale
    if optimizer.scale_set_by_backward:
        out_scale = min(grad_scale, stash_scale)
    scales = (grad_scale, stash_scale, out_scale)
    pairs = (
        (stash.all_fp16_params, stash.all_fp16_grad_stash),
        (stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash),
    )
    with torch.no_grad():
        for params, kept in pairs:
            _combine(params, kept, scaler, scales)
    stash.stashed = False
    optimizer.most_recent_scale = out_scale
    optimizer.scale_set_by_backward = True


def _combine(
    params: Sequence[Tensor], kept: list[Tensor | None], scaler: LossScaler, scales: tuple[float, float, float]
) -> None:
    grad_scale, stash_scale, out_scale = scales
    fresh: list[Tensor] = []
    both: list[Tensor] = []
    stashed: list[Tensor] = []
    for index, param in enumerate(params):
        grad, old = param.grad, kept[index]
        kept[index] = None
        if grad is None:
            param.grad = old
            if old is not None and out_scale != stash_scale and not _amp_state.strict:
                old.mul_(out_scale / stash_scale)
        elif old is None:
            fresh.append(grad)
        else:
            both.append(grad)
            stashed.append(old)
    if fresh:
        scaler.unscale(fresh, fresh, grad_scale, models_are_masters=True, scale_override=grad_scale / out_scale)
    if both:
        scaler.unscale_with_stashed(both, stashed, both, scale_override=scales)
