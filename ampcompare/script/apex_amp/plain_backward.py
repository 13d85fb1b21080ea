"""Notice `loss.backward()` outside of a `scale_loss` block, in a script for Apex.

Apex adds such true gradients to those that it has unscaled at the end of each block. An arm unscales later, so it must
know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ampcompare.guards.events import Points, Subscriptions
from ampcompare.script.apex_amp.amp import ScriptAmp
from ampcompare.script.legacy.record.rows import Rows, value_of

__all__ = ["PlainBackward"]


class PlainBackward:
    """Records losses that nothing scales, and prepares an arm for their gradients.

    Args:
        amp: what stands behind `apex.amp`; None under arms of Apex, whose engine has true gradients at any time.
        rows: records losses.
    """

    def __init__(self, amp: ScriptAmp | None, rows: Rows | None) -> None:
        self._amp = amp
        self._rows = rows

    def install(self, events: Subscriptions) -> None:
        """Watch all backward passes that accumulate gradients."""
        events.wrap(*Points.BACKWARD, self._backward)

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        losses: Sequence[Tensor] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if self._amp is not None:
            self._amp.before_backward(losses)
        if self._rows is not None and self._rows.has_initialized and not self._rows.blocks:
            self._rows.add_plain_backward(value_of(losses[0]))
        return original(tensors, *args, **kwargs)
