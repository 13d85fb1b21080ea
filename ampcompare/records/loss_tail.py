"""The training loss at the end of a run: its mean over the last fifth of the steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["loss_tail"]

PARTS = 5  # the tail is the last of so many


def loss_tail(losses: Sequence[float]) -> dict[str, float | int | None]:
    """Return the fields `loss_tail` and `loss_tail_steps` of a summary; no loss for a run without steps.

    Args:
        losses: of each step, in order.
    """
    if not losses:
        return {"loss_tail": None, "loss_tail_steps": 0}
    tail = losses[-max(1, len(losses) // PARTS) :]
    return {"loss_tail": statistics.fmean(tail), "loss_tail_steps": len(tail)}
