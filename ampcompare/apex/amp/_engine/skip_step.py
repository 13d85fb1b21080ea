"""Skip the next step of an optimizer, as Apex does after an overflow that the host has read.

Source: Apex 25.05, `apex/amp/handle.py`; scripts parse the overflow line.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from ampcompare.apex.amp._amp_state import _amp_state, maybe_print, overflow_message
from ampcompare.apex.amp.scaler import LossScaler

from .errors import AmpScalingError

__all__ = ["skip_next_step"]


def skip_next_step(optimizer: Any, scaler: LossScaler, loss_id: int) -> None:
    """Make the next `optimizer.step()` a skip.

    The replacement is a bound method, so that LR schedulers can wrap it; such a scheduler keeps its
    wrapper, and later steps pass through to the original.
    """
    stash = optimizer._amp_stash
    if stash.already_patched:
        return
    inner: Callable[..., Any] = optimizer.step
    had_instance_step = "step" in optimizer.__dict__
    spent = False

    def skip_step(self: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        nonlocal spent
        if spent:
            return inner(**kwargs) if closure is None else inner(closure, **kwargs)
        if closure is not None:
            raise AmpScalingError("optimizer.step(closure) does not work with amp: call step() without a closure.")
        maybe_print(overflow_message(loss_id, scaler.loss_scale()))
        stash.flags = []
        for master in getattr(stash, "all_fp32_from_fp16_params", ()):
            master.grad = None
        stash.release_buffers()
        if hasattr(self, "most_recent_scale"):
            self.most_recent_scale = 1.0
            self.scale_set_by_backward = False
        spent = True
        stash.already_patched = False
        if getattr(self.__dict__.get("step"), "__func__", None) is skip_step:
            if had_instance_step:
                self.step = inner
            else:
                del self.step
        if not _amp_state.strict:
            # The user called step: prevents a warning of torch's schedulers about the order of calls.
            self._opt_called = True
        return None

    optimizer.step = types.MethodType(skip_step, optimizer)
    stash.already_patched = True
