"""Prepare the gradients of one optimizer for a backward pass, and unscale what the pass wrote.

Existing gradients are stashed first: the pass then writes into new buffers (autograd assigns them without a
copy), only those are divided by the scale, and the stashed gradients, already unscaled, are added.

Source: Apex 25.05, `apex/amp/_process_optimizer.py`; the order of roundings is the same: multiply, then add.
"""

import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ampcompare.apex.amp._amp_state import _amp_state
from ampcompare.apex.amp.scaler import LossScaler

from .optimizer_state import AmpOptimizerState

# The reference count of a tensor to which only one list refers.
_UNSHARED = max(map(sys.getrefcount, [object()]))


def prepare_backward_no_master_weights(optimizer: Any) -> None:
    """Stash the gradients of all parameters of the model."""
    stash: AmpOptimizerState = optimizer._amp_stash
    if not stash.lazy_init_called:
        optimizer._amp_lazy_init()
    if stash.stashed:
        drop_leftover_stashes(stash)
    for params, kept in stash.params_and_stashes():
        stash.stashed |= stash_grads(params, kept)


def post_backward_no_master_weights(optimizer: Any, scaler: LossScaler) -> None:
    """Unscale the gradients of the pass in place, then add the stashed ones."""
    stash: AmpOptimizerState = optimizer._amp_stash
    if not stash.lazy_init_called:
        optimizer._amp_lazy_init()
    with GradientsOff():
        sums = _DeferredAdditions()
        if stash.stashed:
            _drop_stashed_if_strict(stash, scaler)
        if stash.all_fp16_params:
            half = _gradients_to_unscale(
                stash.all_fp16_params, stash.all_fp16_grad_stash, stash.stashed, sums
            )
            scaler.unscale_(half, uniform=stash.uniform_device)
        full = _gradients_to_unscale(stash.all_fp32_params, stash.all_fp32_grad_stash, stash.stashed, sums)
        scaler.unscale_(full, uniform=stash.uniform_device)
        if sums.totals:
            sums.make_all()
    stash.stashed = False


def prepare_backward_with_master_weights(optimizer: Any) -> None:
    """Drop the half gradients of the model, and stash those of parameters that are their own masters."""
    stash: AmpOptimizerState = optimizer._amp_stash
    if not stash.lazy_init_called:
        optimizer._amp_lazy_init()
    for param in stash.all_fp16_params:
        param.grad = None
    if stash.stashed:
        drop_leftover_stashes(stash)
    if stash.all_fp32_from_fp32_params:
        stash.stashed = stash_grads(stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash)


def post_backward_with_master_weights(optimizer: Any, scaler: LossScaler) -> None:
    """Write the half gradients of the model into the masters, unscaled, adding to what is there.

    The half gradients stay as they are, scaled.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    if not stash.lazy_init_called:
        optimizer._amp_lazy_init()
    with GradientsOff():
        sums = _DeferredAdditions()
        targets, sources = _half_grads_and_buffers(stash, sums)
        if stash.stashed:
            _drop_stashed_if_strict(stash, scaler)
        own = stash.all_fp32_from_fp32_params
        fresh = (
            targets + _gradients_to_unscale(own, stash.all_fp32_from_fp32_grad_stash, stash.stashed, sums)
            if own
            else targets
        )
        _copy_to_fp32_buffers(targets, sources)
        scaler.unscale_(fresh, uniform=stash.uniform_device)
        if sums.totals:
            sums.make_all()
    stash.stashed = False


def restore_stashed_gradients(optimizer: Any) -> None:
    """Restore the gradients stashed for a backward pass that failed, and drop those that it wrote."""
    stash: AmpOptimizerState = optimizer._amp_stash
    for params, kept in stash.params_and_stashes():
        for index, param in enumerate(params):
            param.grad = kept[index]
            kept[index] = None
    stash.stashed = False


def stash_grads(params: Sequence[Tensor], kept: list[Tensor | None]) -> bool:
    """Move each `.grad` into `kept`, leaving None; return whether there was any."""
    has_grads = False
    for index, param in enumerate(params):
        grad = param.grad
        if grad is not None:
            kept[index] = grad
            param.grad = None
            has_grads = True
    return has_grads


class _DeferredAdditions:
    """Additions to make once the new gradients are unscaled."""

    __slots__ = ("addends", "totals")

    def __init__(self) -> None:
        self.totals: list[Tensor] = []
        self.addends: list[Tensor] = []

    def defer(self, total: Tensor, addend: Tensor) -> None:
        self.totals.append(total)
        self.addends.append(addend)

    def make_all(self) -> None:
        if any(grad.is_sparse for grad in self.totals) or any(grad.is_sparse for grad in self.addends):
            for total, addend in zip(self.totals, self.addends, strict=True):
                total.add_(addend)
        else:
            torch._foreach_add_(self.totals, self.addends)


def _gradients_to_unscale(
    params: Sequence[Tensor], kept: list[Tensor | None], stashed: bool, sums: _DeferredAdditions
) -> list[Tensor]:
    if not stashed:
        return [grad for param in params if (grad := param.grad) is not None]
    fresh: list[Tensor] = []
    for index, param in enumerate(params):
        grad, old = param.grad, kept[index]
        kept[index] = None
        if grad is None:
            param.grad = old
            continue
        fresh.append(grad)
        if old is not None:
            sums.defer(grad, old)
    return fresh


def _drop_stashed_if_strict(stash: AmpOptimizerState, scaler: LossScaler) -> None:
    """Drop the stashed gradients at a static scale of 1, as Apex does."""
    if _amp_state.strict and not scaler.dynamic and scaler.loss_scale() == 1.0:
        drop_leftover_stashes(stash)


def drop_leftover_stashes(stash: AmpOptimizerState) -> None:
    """Drop what another pass stashed and did not restore, as Apex does, even if there is no new gradient.

    That pass failed, in strict mode, or this block is nested inside its block.
    """
    for _, kept in stash.params_and_stashes():
        kept[:] = [None] * len(kept)
    stash.stashed = False


def _half_grads_and_buffers(
    stash: AmpOptimizerState, sums: _DeferredAdditions
) -> tuple[list[Tensor], list[Tensor]]:
    """Return fp32 buffers, which become the gradients of masters without one, and the half gradients for them."""
    masters = stash.all_fp32_from_fp16_params
    sources = [grad for param in stash.all_fp16_params if (grad := param.grad) is not None]
    taken = [master for master in masters if master.grad is not None]
    if len(sources) == len(masters) and not taken:
        buffers: list[Any] = stash.master_grad_buffers
        if sum(map(sys.getrefcount, buffers)) != _UNSHARED * len(buffers):
            _allocate_private_buffers(stash, range(len(buffers)))
        for master, buffer in zip(masters, buffers, strict=True):
            master.grad = buffer
        targets = list(buffers)
    else:
        targets = _choose_gradient_buffers(stash, sums)
    return targets, sources


def _copy_to_fp32_buffers(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy half gradients to fp32 buffers."""
    if not sources:
        return
    try:
        torch._foreach_copy_(targets, sources)
    except (NotImplementedError, RuntimeError):
        if not any(grad.is_sparse for grad in sources):
            raise
        for target, grad in zip(targets, sources, strict=True):
            target.copy_(grad.to_dense() if grad.is_sparse else grad)


def _choose_gradient_buffers(stash: AmpOptimizerState, sums: _DeferredAdditions) -> list[Tensor]:
    """Choose a buffer for each half gradient: a temporary one if the master has a gradient to add to."""
    masters, buffers = stash.all_fp32_from_fp16_params, stash.master_grad_buffers
    present = [index for index, param in enumerate(stash.all_fp16_params) if param.grad is not None]
    _allocate_private_buffers(stash, [index for index in present if masters[index].grad is None])
    targets: list[Any] = []
    for index in present:
        master = masters[index]
        total = master.grad
        if total is None:
            target = master.grad = buffers[index]
        else:
            target = torch.empty_like(master, requires_grad=False)
            sums.defer(total, target)
        targets.append(target)
    return targets


def _allocate_private_buffers(stash: AmpOptimizerState, indices: Iterable[int]) -> None:
    """Create missing buffers, and replace shared ones: a gradient that the script kept must not change."""
    buffers = stash.master_grad_buffers
    references = list(map(sys.getrefcount, buffers))
    for index in indices:
        if buffers[index] is None or references[index] != _UNSHARED:
            buffers[index] = torch.empty_like(stash.all_fp32_from_fp16_params[index], requires_grad=False)


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
