"""Skip a step inside the optimizer's fused kernel, so that the host need not know of the overflow.

A call of `scale_loss` goes this way where every optimizer is a torch one with fused kernels on one GPU, nothing
watches its steps, and the scaler is dynamic with exact powers of two; any other reads the flag on the host, as Apex
does. Both give the same bits.

Each `scale_loss` exit hands its overflow flag to the optimizers listed; their next step takes the union as `found_inf`,
which torch's fused kernels obey.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ._amp_state import _amp_state, maybe_print, overflow_message
from ._deferred import DeferredMessages
from ._errors import AmpScalingError

if TYPE_CHECKING:
    from .scaler import LossScaler

__all__ = ["Flag", "common_device", "install", "note_pass", "note_step", "union"]

_FUSED_TYPES = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad})
# On a CPU the flag is read for nothing, and arithmetic on scalars of a device costs more than the host's.
_DEVICE_TYPES = frozenset({"cuda"})
_MOST_FLAGS = 32
_SCHEDULER_GLOBALS = LRScheduler.__init__.__globals__

Flag = tuple[Tensor, "LossScaler", int]
"""An overflow flag on the device, the scaler that it belongs to, and its `loss_id`."""


def install(optimizer: Any) -> None:
    """Let `optimizer.step` honor the flags of its backward passes, if its type and options allow for it."""
    if type(optimizer) not in _FUSED_TYPES or not _has_fused_groups(optimizer):
        return
    inner: Callable[..., Any] = optimizer.step

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        flags: list[Flag] = self._amp_stash.flags
        if not flags:
            return inner() if closure is None else inner(closure)
        self._amp_stash.flags = []
        flag = union(flags)
        if closure is not None:
            if flag.item():
                raise AmpScalingError("optimizer.step(closure) does not work with amp: call step() without a closure.")
            return inner(closure)
        _seed_momentum(self)
        if _amp_state.verbosity > 0:
            _report(flags)
        self.found_inf, self.grad_scale = flag, None
        try:
            return inner()
        finally:
            del self.found_inf, self.grad_scale

    if hasattr(inner, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)
    optimizer._amp_stash.takes_flags = True


def note_step(optimizer: Any) -> None:
    """Remember amp's outermost `step`: one put over it later is not to run where Apex would have bypassed it."""
    if optimizer._amp_stash.takes_flags:
        optimizer._amp_stash.own_step = optimizer.step.__func__


def _has_fused_groups(optimizer: Any) -> bool:
    for group in optimizer.param_groups:
        if not group["fused"]:
            return False
        # A skipped first step leaves torch's momentum uninitialized; zeros stand in for it, but not under dampening.
        if group.get("dampening") and group["momentum"]:
            return False
    return True


def common_device(loss: Any, optimizers: list[Any]) -> torch.device | None:
    """Return the device that all of this backward pass lives on if nobody needs its overflow flag on the host."""
    if not optimizers or not optimizers[0]._amp_stash.takes_flags or not isinstance(loss, Tensor):
        return None
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
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
        if not _has_fused_groups(optimizer) or not stash.uniform_device or not params or params[0].device != device:
            return None
    return device


def _is_own_step(step: Any, own: Any) -> bool:
    function = getattr(step, "__func__", step)
    if function is own:
        return True
    # What a scheduler puts over it only notes that `step` was called, as amp's skip does.
    return getattr(function, "__wrapped__", None) is own and function.__globals__ is _SCHEDULER_GLOBALS


def note_pass(optimizer: Any, flag: Tensor, scaler: LossScaler, loss_id: int) -> None:
    """Let the next step of `optimizer` be a skip if `flag` is set."""
    flags: list[Flag] = optimizer._amp_stash.flags
    if len(flags) >= _MOST_FLAGS:  # an optimizer that is listed but never steps must not pile them up
        flags[:] = [(union(flags), flags[0][1], flags[0][2])]
    flags.append((flag, scaler, loss_id))


def union(flags: list[Flag]) -> Tensor:
    """Return one flag that is set if any of these is; the flags stay as they are."""
    flag = flags[0][0]
    for other, _, _ in flags[1:]:
        flag = torch.maximum(flag, other)
    return flag


def _seed_momentum(optimizer: Any) -> None:
    """Give SGD the momentum that its first step would make, as far as that can be known before it.

    `-0.0` times anything plus the gradient is the gradient, down to the sign of a zero.
    """
    stash = optimizer._amp_stash
    state = optimizer.state
    if type(optimizer) is not torch.optim.SGD or (stash.seeded is state and len(state) >= stash.seeded_count):
        return
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for param in group["params"]:
            if param.requires_grad and state[param].get("momentum_buffer") is None:
                state[param]["momentum_buffer"] = torch.full_like(
                    param, -0.0, memory_format=torch.preserve_format, requires_grad=False
                )
    stash.seeded, stash.seeded_count = state, len(state)


def _can_be_read_at_once(flag: Tensor) -> bool:
    return flag.device.type == "cpu"


def _report(flags: list[Flag]) -> None:
    """Print Apex's line for a skipped step: now where reading costs nothing, else as soon as the device tells."""
    if _can_be_read_at_once(flags[0][0]):
        for flag, scaler, loss_id in flags:
            if flag.item():
                maybe_print(overflow_message(loss_id, scaler.loss_scale()))
                return
        return
    scales = [scaler.scale_tensor(flag.device) for flag, scaler, _ in flags]
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
