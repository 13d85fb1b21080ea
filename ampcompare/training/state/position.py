"""How far a run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Position"]


@dataclass
class Position:
    """How far a run is at a drain point.

    Attributes:
        step: updates made.
        epoch: epochs completed, their evaluation included.
        batch: updates made in the current epoch.
        train_seconds: time spent on them.
        skipped: updates that were skipped, over all optimizers.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    train_seconds: float = 0.0
    skipped: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step, self.epoch, self.batch = int(state["step"]), int(state["epoch"]), int(state["batch"])
        self.train_seconds, self.skipped = float(state["train_seconds"]), int(state["skipped"])
