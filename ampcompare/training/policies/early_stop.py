"""Ends in a good state that a user sets: a target accuracy, and patience without improvement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampcompare.records.evaluation import EpochResult
from ampcompare.settings.config import RunConfig
from ampcompare.training.policies.policy import Policy

__all__ = ["EarlyStop"]


class EarlyStop(Policy):
    """Decides after each evaluation whether training may end, by the top-1 accuracy of the weights (not of their EMA).

    Args:
        patience: consecutive epochs without a better top-1; None for any number.
        target: top-1 in percent that is enough; None for none.
    """

    name = "early_stop"

    def __init__(self, patience: int | None, target: float | None) -> None:
        self._patience = patience
        self._target = target
        self._best = -1.0
        self._waited = 0
        self.ended: str | None = None

    @classmethod
    def from_config(cls, config: RunConfig) -> EarlyStop | None:
        """Return the early stop of a configuration; None if it sets none."""
        recipe = config.recipe
        if recipe.early_stop is None and recipe.target_top1 is None:
            return None
        return cls(recipe.early_stop, recipe.target_top1)

    def after_epoch(self, result: EpochResult) -> None:
        """Compare the top-1 of an epoch with the target and with the best so far."""
        improved = result.top1 > self._best
        self._best, self._waited = max(self._best, result.top1), 0 if improved else self._waited + 1
        if self._target is not None and 100 * result.top1 >= self._target:
            self.ended = f"top-1 of {100 * result.top1:.2f} % reached {self._target:g} % after epoch {result.epoch}"
        elif self._patience is not None and self._waited >= self._patience:
            self.ended = f"no better top-1 for {self._waited} epochs, after epoch {result.epoch}"

    def state_dict(self) -> dict[str, Any]:
        """Return the best top-1, and for how many epochs it has been the best."""
        return {"best": self._best, "waited": self._waited, "reason": self.ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._best, self._waited = float(state["best"]), int(state["waited"])
        self.ended = state["reason"]
