"""Limits on loss scaling that a user sets: a floor under the loss scale, and a maximum of consecutive skipped steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampcompare.records.run import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.training.policies.divergence import DivergenceDetector
from ampcompare.training.policies.policy import Policy

__all__ = ["ScaleLimits"]


class ScaleLimits(Policy):
    """Ends a run as diverged if its loss scale collapses: each overflow lowers the scale, and no step is applied.

    Args:
        divergence: records the end and its reason.
        stop_loss_scale: the run ends if a loss scale is below it; None for no floor.
        max_skipped: the run ends after more consecutive skipped steps than this; None for no maximum.
    """

    name = "limits"

    def __init__(
        self, divergence: DivergenceDetector, stop_loss_scale: float | None = None, max_skipped: int | None = None
    ) -> None:
        self._divergence = divergence
        self._stop_loss_scale = stop_loss_scale
        self._max_skipped = max_skipped
        self._skipped = 0

    @classmethod
    def from_config(cls, config: RunConfig, divergence: DivergenceDetector) -> ScaleLimits | None:
        """Return the limits of a configuration; None if it sets none."""
        if config.stop_loss_scale is None and config.max_skipped is None:
            return None
        return cls(divergence, config.stop_loss_scale, config.max_skipped)

    def after_steps(self, step: int, records: Sequence[StepRecord]) -> bool:
        """Check each step of a block against the limits; never changes weights."""
        for record in records:
            reason = self._exceeded(record)
            if reason is not None:
                self._divergence.end(record.step, reason)
                break
        return False

    def _exceeded(self, record: StepRecord) -> str | None:
        self._skipped = 0 if all(record.applied) else self._skipped + 1
        if self._max_skipped is not None and self._skipped > self._max_skipped:
            return f"{self._skipped} skipped steps in a row, more than --max-consecutive-skips {self._max_skipped}"
        lowest = min(record.loss_scales, default=None)
        if lowest is not None and self._stop_loss_scale is not None and lowest < self._stop_loss_scale:
            return f"loss scale {lowest:g} is below --fail-below-loss-scale {self._stop_loss_scale:g}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of consecutive skipped steps."""
        return {"skipped": self._skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._skipped = int(state["skipped"])
