"""Ends in a good state that a user sets: a target of the metric, and patience without improvement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampcompare.runs.records.evaluation import EpochResult
from ampcompare.runs.records.metric import Metric
from ampcompare.runs.settings.config import RunConfig
from ampcompare.training.policies.policy import Policy

__all__ = ["NO_VALUE", "EarlyStop"]

NO_VALUE = -1.0  # what older checkpoints hold before the first evaluation


class EarlyStop(Policy):
    """Decides after each evaluation whether training may end, by the metric of the weights (not of their EMA).

    Args:
        patience: consecutive epochs without a better value; None for any number.
        target: value that is enough, as it is shown; None for none.
        metric: of the task.
    """

    name = "early_stop"

    def __init__(self, patience: int | None, target: float | None, metric: Metric) -> None:
        self._patience = patience
        self._target = target
        self._metric = metric
        self._best: float | None = None
        self._waited = 0
        self.ended: str | None = None

    @classmethod
    def from_config(cls, config: RunConfig, metric: Metric) -> EarlyStop | None:
        """Return the early stop of a configuration; None if it sets none."""
        recipe = config.recipe
        if recipe.early_stop is None and recipe.target is None:
            return None
        return cls(recipe.early_stop, recipe.target, metric)

    def after_epoch(self, result: EpochResult) -> None:
        """Compare the value of an epoch with the target and with the best so far."""
        metric, value = self._metric, result.value
        improved = metric.is_better(value, self._best)
        self._best, self._waited = (value, 0) if improved else (self._best, self._waited + 1)
        if self._target is not None and not metric.is_better(self._target, metric.factor * value):
            unit = f" {metric.unit}" if metric.unit else ""
            self.ended = (
                f"{metric.name} of {metric.shown(value)} reached {self._target:g}{unit} after epoch {result.epoch}"
            )
        elif self._patience is not None and self._waited >= self._patience:
            self.ended = f"no better {metric.name} for {self._waited} epochs, after epoch {result.epoch}"

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and for how many epochs it has been the best."""
        return {"best": self._best, "waited": self._waited, "reason": self.ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        best = state["best"]
        self._best = None if best is None or best == NO_VALUE else float(best)
        self._waited = int(state["waited"])
        self.ended = state["reason"]
