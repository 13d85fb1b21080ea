"""Lines of a script that limit gradients within a backward pass whose loss it has scaled itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampcompare.base.location import user_location
from ampcompare.base.patches import PatchPoints, Subscriptions
from ampcompare.guards.checks.clipping import BEHIND_HOOKS
from ampcompare.guards.detection.gradient_hooks import GradientHooks, follow_tensor_limits


class LimitedScaledGradientsWatch:
    """Notes such lines; a script without a scaler gets true gradients under every arm, and is none."""

    def __init__(self) -> None:
        self._hooks = GradientHooks()
        self._is_scaled = self._is_in_backward = False
        self._lines: dict[str, None] = {}

    def follow(self, events: Subscriptions) -> None:
        """Follow the script from now on, until the end of `events`."""
        self._hooks.follow_registrations(events)
        follow_tensor_limits(events, lambda: self._is_in_backward, self._note_gradient_limit)
        events.wrap(torch.amp.GradScaler, "scale", self._scale)
        for name in ("apex.amp", "apex.amp.handle"):
            if name in sys.modules:
                events.wrap(sys.modules[name], "scale_loss", self._scale_loss)
        events.wrap(*PatchPoints.BACKWARD, self._backward)

    def end_step(self) -> None:
        """Forget whether a loss of the step was scaled."""
        self._is_scaled = False

    def gradient_limits_text(self) -> str:
        """Return what the script does to its gradients, with the lines and a remedy; "" for nothing."""
        where = ", ".join(self._lines)
        return (
            f"gradients are limited within the backward pass, which has them multiplied by the loss scale ({where}), "
            f"so that the limit is divided by it: {BEHIND_HOOKS}"
            if where
            else ""
        )

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        self._is_scaled |= scaler.is_enabled() and scaler.get_scale() != 1
        return original(scaler, outputs)

    @contextmanager
    def _scale_loss(self, original: Any, loss: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with original(loss, *args, **kwargs) as scaled:
            self._is_scaled |= scaled is not loss  # an arm that is not Apex's scales behind the script's back
            del loss  # which has the graph
            yield scaled

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        before, self._is_in_backward = self._is_in_backward, self._is_scaled
        try:
            return original(*args, **kwargs)
        finally:
            self._is_in_backward = before

    def _note_gradient_limit(self, tensor: Any, result: Any) -> None:
        if self._hooks.is_gradient(tensor):
            self._lines[str(user_location())] = None
