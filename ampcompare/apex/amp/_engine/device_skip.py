"""Skip a step on the device, so that the host need not read the overflow flag.

`scale_loss` uses this path if every optimizer obeys a flag on the device, all are on one GPU, nothing hooks their
steps, and the scaler is dynamic with exact powers of two; else it reads the flag on the host, as Apex does. Both give
the same bits.

Each `scale_loss` exit passes its overflow flag to its optimizers; their next step uses the union as `found_inf`, which
torch's fused kernels obey, and the optimizers of `ampcompare.base.tensors.skippable_step`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ampcompare.apex.amp._amp_state import DeferredMessages, _amp_state, maybe_print, overflow_message
from ampcompare.base.tensors.skippable_step import has_changing_global_step_hooks, is_step_skippable

from .errors import AmpScalingError
from .optimizer_state import Flag

if TYPE_CHECKING:
    from ampcompare.apex.amp.scaler import LossScaler

_FUSED_TYPES = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad})
# On a CPU reading the flag is free, and arithmetic on tensors costs more than on Python floats.
_DEVICE_TYPES = frozenset({"cuda"})
_MAX_FLAGS = 32
_SCHEDULER_GLOBALS = LRScheduler.__init__.__globals__


def make_step_honor_overflow_flags(optimizer: Any) -> None:
    """Make `optimizer.step` honor the flags of its backward passes, if its type and options allow it."""
    if type(optimizer) not in _FUSED_TYPES or not _obeys_overflow_flags(optimizer):
        return
    inner: Callable[..., Any] = optimizer.step

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        flags: list[Flag] = self._amp_stash.flags
        if not flags:
            return inner() if closure is None else inner(closure)
        self._amp_stash.flags = []
        flag = union_of_flags(flags)
        if closure is not None:
            if flag.item():
                raise AmpScalingError(
                    "optimizer.step(closure) does not work with amp: call step() without a closure."
                )
            return inner(closure)
        if not is_step_skippable(self):
            _create_momentum_buffers(self)
        if _amp_state.verbosity > 0:
            _report_skipped_step(flags)
        self.found_inf, self.grad_scale = flag, None
        try:
            return inner()
        finally:
            del self.found_inf, self.grad_scale

    if hasattr(inner, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)
    optimizer._amp_stash.takes_flags = True


def note_outermost_step(optimizer: Any) -> None:
    """Record amp's outermost `step`, to detect a later wrapper, which Apex would bypass on a skip."""
    if optimizer._amp_stash.takes_flags:
        optimizer._amp_stash.own_step = optimizer.step.__func__


def _obeys_overflow_flags(optimizer: Any) -> bool:
    return is_step_skippable(optimizer) or _has_fused_groups(optimizer)


def _has_fused_groups(optimizer: Any) -> bool:
    for group in optimizer.param_groups:
        if not group["fused"]:
            return False
        # A skipped first step leaves torch's momentum uninitialized; zeros replace it, which is wrong with dampening.
        if group.get("dampening") and group["momentum"]:
            return False
    return True


def find_flag_device(loss: Any, optimizers: list[Any]) -> torch.device | None:
    """Return the device of this whole backward pass if nothing needs its overflow flag on the host, else None."""
    if not optimizers or not optimizers[0]._amp_stash.takes_flags or not isinstance(loss, Tensor):
        return None
    if has_changing_global_step_hooks():
        return None
    device = loss.device
    if device.type not in _DEVICE_TYPES:
        return None
    for optimizer in optimizers:
        stash = optimizer._amp_stash
        if not stash.takes_flags:
            return None
        if not _is_own_step(optimizer.step, stash.own_step):
            return None
        optimizer._amp_lazy_init()
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return None
        params = optimizer.param_groups[0]["params"]
        if not params or params[0].device != device or not stash.uniform_device:
            return None
        if not _obeys_overflow_flags(optimizer):
            return None
    return device


def can_skip_without_host(optimizer: Any) -> bool:
    """Return whether `optimizer` works without its overflow flags on the host."""
    if not optimizer._amp_stash.takes_flags or not _obeys_overflow_flags(optimizer):
        return False
    return not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _is_own_step(step: Any, own: Any) -> bool:
    function = getattr(step, "__func__", step)
    if function is own:
        return True
    # A scheduler's wrapper only records that `step` was called, as amp's skip does.
    return getattr(function, "__wrapped__", None) is own and function.__globals__ is _SCHEDULER_GLOBALS


def skip_next_step_if_flag(optimizer: Any, flag: Tensor, scaler: LossScaler, loss_id: int) -> None:
    """Make the next step of `optimizer` a skip if `flag` is set."""
    flags: list[Flag] = optimizer._amp_stash.flags
    if len(flags) >= _MAX_FLAGS:  # bounds memory for an optimizer that is passed but never steps
        flags[:] = [(union_of_flags(flags), flags[0][1], flags[0][2])]
    flags.append((flag, scaler, loss_id))


def union_of_flags(flags: list[Flag]) -> Tensor:
    """Return one flag that is set if any of these is; the flags stay as they are."""
    flag = flags[0][0]
    for other, _, _ in flags[1:]:
        flag = torch.maximum(flag, other)
    return flag


def _create_momentum_buffers(optimizer: Any) -> None:
    """Create the momentum buffers of SGD that its first step would create.

    `-0.0` times anything plus the gradient is the gradient, down to the sign of a zero.
    """
    stash = optimizer._amp_stash
    state = optimizer.state
    if type(optimizer) is not torch.optim.SGD or (
        stash.momentum_state is state and len(state) >= stash.momentum_count
    ):
        return
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for param in group["params"]:
            if param.requires_grad and state[param].get("momentum_buffer") is None:
                state[param]["momentum_buffer"] = torch.full_like(
                    param, -0.0, memory_format=torch.preserve_format, requires_grad=False
                )
    stash.momentum_state, stash.momentum_count = state, len(state)


def _is_flag_free_to_read(flag: Tensor) -> bool:
    return flag.device.type == "cpu"


def _report_skipped_step(flags: list[Flag]) -> None:
    """Print Apex's line for a skipped step: now if reading is free, else once the device has the flag."""
    if _is_flag_free_to_read(flags[0][0]):
        for flag, scaler, loss_id in flags:
            if flag.item():
                maybe_print(overflow_message(loss_id, scaler.loss_scale()))
                return
        return
    present = [(flag, scaler.scale_for_product()) for flag, scaler, _ in flags]
    scales = [scale if isinstance(scale, Tensor) else torch.full_like(flag, scale) for flag, scale in present]
    loss_ids = [loss_id for _, _, loss_id in flags]

    def render(values: list[float]) -> str | None:
        for loss_id, overflow, scale in zip(loss_ids, values, values[len(loss_ids) :], strict=False):
            if overflow:
                return overflow_message(loss_id, scale)
        return None

    messages = _amp_state.deferred
    if messages is None:
        messages = _amp_state.deferred = DeferredMessages()
    messages.add([flag for flag, _, _ in flags] + scales, render)
