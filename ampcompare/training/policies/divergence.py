"""When a run counts as diverged: its weights are not finite, or its loss was not for many consecutive steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampcompare.base.tensors.lists import by_type
from ampcompare.base.tensors.sharded import local
from ampcompare.runs.records.run import StepRecord
from ampcompare.training.policies.policy import Policy

__all__ = ["DivergenceDetector", "weights_finite"]


def weights_finite(models: Sequence[nn.Module]) -> bool:
    """Return whether every parameter, or this rank's part of it, is finite; waits for the device once.

    The largest magnitude of each tensor is used, since a 2-norm in fp16 overflows on large finite weights.
    """
    params = [local(param.detach()) for model in models for param in model.parameters()]
    params = [param for param in params if param.numel()]
    if not params:
        return True
    norms = [norm for alike in by_type(params) for norm in torch._foreach_norm(alike, math.inf)]
    largest = torch.stack([norm.float() for norm in norms])
    return bool(largest.isfinite().all())


class DivergenceDetector(Policy):
    """Finds out whether a run has diverged, block by block.

    A non-finite loss alone is not divergence: under dynamic scaling its step is skipped and the weights stay good.

    Args:
        patience: consecutive non-finite losses that count as divergence.
        models: whose weights are checked after each block.
        any_rank: returns whether a flag is set on any rank; all ranks must stop together.
        stops: whether a run that has diverged ends.

    Attributes:
        first_nonfinite_loss_step: of the whole run.
        diverged_step: the first bad step, once the run has diverged.
        reason: why the run counts as diverged.
    """

    name = "watch"

    def __init__(
        self,
        patience: int,
        models: Sequence[nn.Module],
        any_rank: Callable[[bool], bool] = bool,
        *,
        stops: bool = True,
    ) -> None:
        self.patience = patience
        self._models = models
        self._any_rank = any_rank
        self._stops = stops
        self._is_final = False
        self.first_nonfinite_loss_step: int | None = None
        self.diverged_step: int | None = None
        self.reason: str | None = None
        self._run_start: int | None = None

    @property
    def ends_run(self) -> bool:
        """Whether the run ends here as diverged."""
        return self._is_final or (self._stops and self.diverged_step is not None)

    @property
    def is_final(self) -> bool:
        """Whether a limit was passed, from which a run does not recover."""
        return self._is_final

    def end(self, step: int, reason: str) -> None:
        """Mark the run as diverged for another reason, and permanently."""
        self.diverged_step, self.reason, self._is_final = step, reason, True

    def recover(self) -> None:
        """Record that the run is back in a good state; the first non-finite loss stays recorded."""
        self.diverged_step = self.reason = self._run_start = None

    def state_dict(self) -> dict[str, Any]:
        """Return what was found: plain values."""
        return {
            "first_nonfinite_loss_step": self.first_nonfinite_loss_step,
            "diverged_step": self.diverged_step,
            "reason": self.reason,
            "run_start": self._run_start,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.first_nonfinite_loss_step = state["first_nonfinite_loss_step"]
        self.diverged_step = state["diverged_step"]
        self.reason = state["reason"]
        self._run_start = state["run_start"]

    def after_steps(self, step: int, records: Sequence[StepRecord]) -> bool:
        """Check the losses of a block and the weights after it; never changes them."""
        if self.diverged_step is not None:
            return False
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
        if self._any_rank(not weights_finite(self._models)):
            # The weights went bad at the first applied step with a bad loss; without one, by the end of the block.
            start = self._run_start if self._run_start is not None else first_applied_bad
            self.diverged_step = start if start is not None else records[-1].step
            self.reason = "non-finite weights"
        elif bad_run_start is not None:
            self.diverged_step = bad_run_start
            self.reason = f"{self.patience} non-finite losses in a row"
        return False
