"""Ends that a user sets: a floor under the loss scale, a row of skipped steps, an accuracy that is enough, patience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampcompare.record import EpochResult, StepRecord

__all__ = ["EarlyStop", "ScaleLimits"]


class ScaleLimits:
    """Tells when loss scaling has lost hold of a run: each overflow lowers the scale, and no step is applied.

    Args:
        stop_loss_scale: the run ends when a loss scale lies below it; None for no such end.
        max_skipped: the run ends when more steps than this were skipped in a row; None for no such end.
    """

    def __init__(self, stop_loss_scale: float | None, max_skipped: int | None) -> None:
        self._stop_loss_scale = stop_loss_scale
        self._max_skipped = max_skipped
        self._skipped = 0

    def look(self, records: Sequence[StepRecord]) -> tuple[int, str] | None:
        """Take in a block of steps; return the step at which a limit was passed and what was seen, or None."""
        for record in records:
            self._skipped = 0 if all(record.applied) else self._skipped + 1
            if self._max_skipped is not None and self._skipped > self._max_skipped:
                return record.step, f"{self._skipped} skipped steps in a row, and --max-skipped is {self._max_skipped}"
            lowest = min(record.loss_scales, default=None)
            if lowest is not None and self._stop_loss_scale is not None and lowest < self._stop_loss_scale:
                return record.step, f"loss scale {lowest:g} is below --stop-loss-scale {self._stop_loss_scale:g}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps were skipped in a row up to now."""
        return {"skipped": self._skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._skipped = int(state["skipped"])


class EarlyStop:
    """Tells after an evaluation whether training may end, by top-1 of the weights themselves.

    Args:
        patience: epochs in a row without a better top-1; None for any number.
        target: top-1 in percent that is enough; None for none.

    Attributes:
        reason: why training ended; None while it goes on.
    """

    def __init__(self, patience: int | None, target: float | None) -> None:
        self._patience = patience
        self._target = target
        self._best = -1.0
        self._waited = 0
        self.reason: str | None = None

    def look(self, result: EpochResult) -> bool:
        """Take in the result of an epoch; return whether training ends here."""
        improved = result.top1 > self._best
        self._best, self._waited = max(self._best, result.top1), 0 if improved else self._waited + 1
        if self._target is not None and 100 * result.top1 >= self._target:
            self.reason = f"top-1 of {100 * result.top1:.2f} % reached {self._target:g} % after epoch {result.epoch}"
        elif self._patience is not None and self._waited >= self._patience:
            self.reason = f"no better top-1 for {self._waited} epochs, after epoch {result.epoch}"
        return self.reason is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the best top-1, and for how many epochs it has been the best."""
        return {"best": self._best, "waited": self._waited, "reason": self.reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._best, self._waited = float(state["best"]), int(state["waited"])
        self.reason = state["reason"]
