"""Which scalers have scaled a loss since their last update, and why one that has not may not divide gradients.

Either the script called `loss.backward()` without the scaler, or it updated the scaler between the steps of two
optimizers: the gradients of the second one have the scale of before the update.
"""

import weakref
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ScalingError
from ampcompare.base.location import (
    Location,
    is_called_by_lightning,
    message_with_script_line,
    user_location,
)
from ampcompare.base.patches import PatchPoints, Subscriptions


class ScaledLossesWatch:
    """Knows for each scaler of a script whether it has scaled a loss since its last update."""

    def __init__(self, arm: Arm | str) -> None:
        self._arm = arm
        self._have_scaled: weakref.WeakSet[Any] = weakref.WeakSet()
        # of the scaled losses before it, where no backward pass has begun since
        self._updates: weakref.WeakKeyDictionary[Any, Location] = weakref.WeakKeyDictionary()

    def install(self, events: Subscriptions) -> None:
        """Follow backward passes from now on."""
        events.wrap(*PatchPoints.BACKWARD, self._forget_updates_at_backward)
        events.wrap(*PatchPoints.GRAD, self._forget_updates_at_backward)

    def _forget_updates_at_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._updates.clear()
        return original(*args, **kwargs)

    def note_loss_scaled_by(self, scaler: Any) -> None:
        self._have_scaled.add(scaler)

    def note_scaler_updated(self, scaler: Any) -> None:
        if scaler in self._have_scaled:
            self._have_scaled.discard(scaler)
            self._updates[scaler] = user_location()

    def require_scaled_loss(self, scaler: Any) -> None:
        """Refuse a scaler that is to divide gradients of a loss that it has not scaled.

        Raises:
            ScalingError: it has scaled none since its last update.
        """
        if scaler not in self._have_scaled:
            raise ScalingError(message_with_script_line(self._why_not_scaled(self._updates.get(scaler))))

    def _why_not_scaled(self, update: Location | None) -> str:
        if update is None:
            call = (
                "self.manual_backward(loss)" if is_called_by_lightning() else "scaler.scale(loss).backward()"
            )
            return (
                f"the scaler divides gradients by its scale, but has scaled no loss since its last update, so under "
                f"{self._arm} they would vanish: call {call} instead of loss.backward()"
            )
        remedy = (
            "call `scaler.update()` once, after the last step"
            if update.caller is None
            else "call a backward pass for each optimizer, since the library updates its scaler in each step"
        )
        return (
            f"scaler.update() in {update} ran between this and the backward pass whose gradients the scaler is to "
            f"divide, which have the scale of before the update, so {self._arm} refuses the step: {remedy}"
        )
