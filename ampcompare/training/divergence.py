"""When a run counts as diverged: its weights are not finite, or its loss was not for many steps in a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampcompare.record import StepRecord

__all__ = ["DivergenceWatch", "weights_finite"]


def weights_finite(models: Sequence[nn.Module]) -> bool:
    """Tell whether every parameter is finite; waits for the device once.

    The largest magnitude of each tensor is used, since a 2-norm in fp16 overflows on large finite weights.
    """
    params = [param.detach() for model in models for param in model.parameters()]
    if not params:
        return True
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(params, math.inf)])
    return bool(largest.isfinite().all())


class DivergenceWatch:
    """Looks at each drained block of steps.

    A non-finite loss alone is not divergence: under dynamic scaling its step is skipped and the weights stay good.

    Args:
        patience: non-finite losses in a row that count as divergence.
        any_rank: whether a flag is set in any of the processes that train together, which must stop together.

    Attributes:
        first_nonfinite_loss_step: of the whole run.
        diverged_step: the first bad step, once the run has diverged.
        reason: what was seen.
    """

    def __init__(self, patience: int, any_rank: Callable[[bool], bool] = bool) -> None:
        self.patience = patience
        self._any_rank = any_rank
        self.first_nonfinite_loss_step: int | None = None
        self.diverged_step: int | None = None
        self.reason: str | None = None
        self._run_start: int | None = None

    def end(self, step: int, reason: str) -> None:
        """Take in that the run is over for another reason that counts as divergence."""
        self.diverged_step, self.reason = step, reason

    def recover(self) -> None:
        """Take in that the run is back in a good state; what was first seen stays noted."""
        self.diverged_step = self.reason = self._run_start = None

    def state_dict(self) -> dict[str, Any]:
        """Return what has been seen: plain values."""
        return {
            "first_nonfinite_loss_step": self.first_nonfinite_loss_step,
            "diverged_step": self.diverged_step,
            "reason": self.reason,
            "run_start": self._run_start,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.first_nonfinite_loss_step = state["first_nonfinite_loss_step"]
        self.diverged_step = state["diverged_step"]
        self.reason = state["reason"]
        self._run_start = state["run_start"]

    def look(self, records: Sequence[StepRecord], models: Sequence[nn.Module]) -> bool:
        """Take in a block of steps and the weights after it; return whether the run has diverged by now."""
        if self.diverged_step is not None:
            return True
        bad_run_start: int | None = None
        first_applied_bad: int | None = None
        for record in records:
            if math.isfinite(record.loss):
                self._run_start = None
                continue
            if self.first_nonfinite_loss_step is None:
                self.first_nonfinite_loss_step = record.step
            if self._run_start is None:
                self._run_start = record.step
            if any(record.applied) and first_applied_bad is None:
                first_applied_bad = record.step
            if record.step - self._run_start + 1 >= self.patience and bad_run_start is None:
                bad_run_start = self._run_start
        if self._any_rank(not weights_finite(models)):
            # The weights went bad at the first applied step with a bad loss; without one, by the end of the block.
            start = self._run_start if self._run_start is not None else first_applied_bad
            self.diverged_step = start if start is not None else records[-1].step
            self.reason = "non-finite weights"
        elif bad_run_start is not None:
            self.diverged_step = bad_run_start
            self.reason = f"{self.patience} non-finite losses in a row"
        return self.diverged_step is not None
