"""The protocol of a policy: a rule that a session applies after each block of steps and after each epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ampcompare.runs.records.evaluation import EpochResult
from ampcompare.runs.records.run import StepRecord
from ampcompare.training.precision.base import Precision

__all__ = ["Policy"]


class Policy:
    """A rule of a run. The defaults do nothing; what a policy decides must be equal on all ranks.

    Attributes:
        name: key of its state in a checkpoint; None for a policy without state.
        ended: why training ends before its last epoch in a good state; None while it continues.
    """

    name: ClassVar[str | None] = None
    ended: str | None = None

    def wrap(self, precision: Precision) -> Precision:
        """Return the precision that the loop trains with."""
        return precision

    def begin(self, step: int) -> None:
        """Start at `step` updates, before the first update of this process."""

    def after_steps(self, step: int, records: Sequence[StepRecord]) -> bool:
        """Apply the rule to a drained block of steps.

        Args:
            step: updates made so far.
            records: of the block.

        Returns:
            Whether the policy changed weights and loss scales.
        """
        return False

    def after_epoch(self, result: EpochResult) -> None:
        """Apply the rule to the evaluation of an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values that a resumed run continues from."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
