"""The rows of a process's record, and the numbers of its optimizers and losses."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ampcompare.script.legacy.record.recorder import Recorder

__all__ = ["Rows", "value_of"]


class Rows:
    """The optimizers of a process, in the order of their first use, and what they did.

    Attributes:
        has_initialized: the script has called `amp.initialize`.
        blocks: of `scale_loss` that are open.
        has_amp: losses and steps come from what stands behind `apex.amp`; a GradScaler is a part of that.
        ignored: GradScalers that are off, whose losses and steps are recorded elsewhere.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.optimizers: list[Any] = []
        self.has_amp = False
        self.has_initialized = False
        self.blocks = 0
        self.ignored: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps: list[int] = []
        self._last_step: list[float | None] = []
        self._backwards = 0
        self._loss_ids = 0

    def number(self, optimizer: Any) -> tuple[int, bool]:
        """Return the number of an optimizer, and whether it is new."""
        for number, other in enumerate(self.optimizers):
            if other is optimizer:
                return number, False
        self.optimizers.append(optimizer)
        self._steps.append(0)
        self._last_step.append(None)
        return len(self.optimizers) - 1, True

    def new_loss_id(self) -> int:
        """Return a number for the losses of a scaler."""
        self._loss_ids += 1
        return self._loss_ids - 1

    def reserve_loss_ids(self, count: int) -> None:
        """Reserve the first `count` numbers for `apex.amp`, which numbers its losses itself."""
        self._loss_ids = max(self._loss_ids, count)

    def add_initialize(self, by: str, optimizers: dict[int, str], scales: list[Any], dynamic: list[bool]) -> None:
        """Record what scales the losses of which optimizers.

        Args:
            by: the opt level of `apex.amp`, or the class of the scaler.
            optimizers: class names by number.
            scales: of each loss scaler; None if it is off.
        """
        row = {
            "kind": "initialize",
            "opt_level": by,
            "optimizers": {str(number): name for number, name in optimizers.items()},
            "loss_scales": scales,
            "dynamic": dynamic,
        }
        self.recorder.add(row, time.perf_counter())

    def add_backward(
        self,
        loss: Any,
        loss_id: int,
        scales: tuple[Any, Any],
        overflow: bool | None,
        numbers: list[int],
        skips: list[int],
    ) -> None:
        """Record a backward pass.

        Args:
            loss: a number, a tensor of one element, or None.
            scales: the loss scale before and after, each a number, a tensor of one element, or what returns the number
                when the row is written; None if nothing scales.
            overflow: None if nothing was checked.
            numbers: of the optimizers that the loss is for.
            skips: of those whose step is skipped because of this pass.
        """
        row = {
            "kind": "backward",
            "backward": self._backwards,
            "loss": loss,
            "loss_id": loss_id,
            "scale_before": scales[0],
            "scale_after": scales[1],
            "overflow": overflow,
            "optimizers": numbers,
            "skips": skips,
        }
        self._backwards += 1
        self.recorder.add(row, time.perf_counter())

    def add_plain_backward(self, loss: Any) -> None:
        """Record a backward pass of a loss that nothing scales, next to `apex.amp`."""
        self.recorder.add({"kind": "plain_backward", "loss": loss}, time.perf_counter())

    def add_note(self, text: str) -> None:
        """Record in what an arm departs from what the script asks for."""
        self.recorder.add({"kind": "note", "text": text}, time.perf_counter())

    def step_row(self, number: int, applied: bool | Callable[[], bool]) -> dict[str, Any]:
        """Return the row of a step that has just ended, or was skipped.

        Args:
            applied: whether it was applied, or what returns that when the row is written.
        """
        now = time.perf_counter()
        last = self._last_step[number]
        row = {
            "kind": "step",
            "optimizer": number,
            "step": self._steps[number],
            "applied": applied,
            "seconds": None if last is None else now - last,
        }
        self._last_step[number] = now
        self._steps[number] += 1
        return row

    def add_step(self, number: int, applied: bool | Callable[[], bool]) -> None:
        """Record a step that has just ended, or was skipped."""
        self.recorder.add(self.step_row(number, applied), time.perf_counter())


def value_of(loss: Any) -> Any:
    """Return a loss or scale as a number if that does not wait for a device, else as a separate tensor."""
    if not isinstance(loss, torch.Tensor):
        return float(loss) if isinstance(loss, (int, float)) else None
    if loss.numel() != 1:
        return None
    return loss.item() if loss.is_cpu else loss.detach().clone()
