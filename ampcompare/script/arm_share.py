"""Record on what share of a script's forward passes and steps the arm acted."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ampcompare.script.legacy.record.recorder import Recorder

__all__ = ["Acted"]


class Acted:
    """Counts, and adds one row to the record when it ends: `{"kind": "acted", "forwards", "cast", "steps", ...}`.

    Attributes:
        forwards: calls of modules that are no part of another call, and whose weights an optimizer has; those of
            evaluations count too, and those that a checkpoint repeats during the backward pass do not.
        cast: those of `forwards` in which the arm's casts were on at some time: its autocast block, O1's casts, or
            weights that it has cast. 0 under `fp32`, `apex:O0` and `script`.
        steps: of all optimizers, skipped ones too.
        scaled: those of `steps` after a backward pass of a loss that was scaled, be it by 1 (O4, O5). 0 under an arm
            without a loss scaler.
        without: those of `steps` whose gradients came from a forward pass without the arm's casts, and from none with
            them: a script that catches the error of its autocast block and repeats the pass without one. None under
            arms without casts.
    """

    def __init__(self, recorder: Recorder, *, casts: bool = True) -> None:
        self._recorder = recorder
        self._casts = casts
        self.forwards = self.cast = self.steps = self.scaled = self.without = 0
        self._was_plain = self._was_reached = False  # since the last step: a training pass without casts; gradients
        self._has_backward = self._is_without = False
        self._is_scaled = False  # a loss since the last step
        self._is_apart = False  # an optimizer has stepped, on gradients without casts, and no row tells of it so far
        recorder.after_row(self._row)
        recorder.before_close(self._end)
        self._hook = register_optimizer_step_pre_hook(self._stepping)

    def forward(self, output: Any, *, cast: bool) -> None:
        """Count a forward pass that has ended, and follow the gradients of what it returned."""
        self.forwards += 1
        self.cast += cast
        if not torch.is_grad_enabled():
            return
        self._count_apart()
        if not cast:
            self._was_plain = True
            return
        followed = [one for one in pytree.tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
        if not followed:  # an object that holds them
            self._was_reached = True
        for tensor in followed:
            tensor.register_hook(self._reach)

    def _reach(self, gradient: Any) -> None:
        self._was_reached = True

    def _stepping(self, *_: Any) -> None:
        self._is_apart = self._was_plain and not self._was_reached

    def _count_apart(self) -> None:
        """Count a step that has no row: a script with a loss scaler steps past it, as where it switches that off."""
        if self._is_apart:
            self.steps += 1
            self.without += 1
            self._is_apart = self._was_plain = False

    def _row(self, row: dict[str, Any]) -> None:
        if row["kind"] in ("backward", "plain_backward"):
            self._has_backward = True
            if row["kind"] == "backward":
                self._is_scaled = row["scale_before"] is not None
        elif row["kind"] == "step":
            self._is_apart = False
            self.steps += 1
            self.scaled += self._is_scaled
            if self._has_backward:  # else another optimizer steps after the same backward pass
                self._is_without = self._was_plain and not self._was_reached
                self._has_backward = self._was_plain = self._was_reached = False
            self.without += self._is_without

    def _end(self) -> None:
        self._hook.remove()
        self._count_apart()
        self._recorder.add_row(
            {
                "kind": "acted",
                "forwards": self.forwards,
                "cast": self.cast,
                "steps": self.steps,
                "scaled": self.scaled,
                "without": self.without if self._casts else None,
            }
        )
