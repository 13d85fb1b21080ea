"""A callback for the `Trainer` of transformers: guards, loss scales and skipped steps.

from ampcompare.integrations.transformers import AmpCompareCallback

Trainer(model, TrainingArguments(fp16=True, ...), callbacks=[AmpCompareCallback()], ...)
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ampcompare.integrations.step_log import StepLog, begin_guards

__all__ = ["AmpCompareCallback"]

_Callback: Any = importlib.import_module("transformers").TrainerCallback


class AmpCompareCallback(_Callback):  # type: ignore[misc]
    """Watches a training, and adds `loss_scale` and `skipped_steps` to what the trainer logs.

    Args:
        guards: "warn" reports mistakes in the use of mixed precision, "strict" raises at them, "off" does not look.
        record: a file for each step, which `ampcompare report` reads.

    Attributes:
        steps: those so far.

    Raises:
        ConfigError: `guards` is none of these; when training begins.
    """

    def __init__(self, guards: str = "warn", record: str | Path | None = None) -> None:
        self.steps = StepLog()
        self._record = record
        self._mode = guards
        self._guards: Any = None
        self._scale: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        self._end()
        self._scale = None
        self._guards = begin_guards(self._mode)
        self.steps = StepLog(self._record if state.is_world_process_zero else None)

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Read the first loss scale."""
        if self._scale is None:
            self._scale = _scale_of(optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Note a step, which Accelerate's scaler may have skipped."""
        if optimizer is None:
            return
        before, self._scale = self._scale, _scale_of(optimizer)
        scales = () if self._scale is None else (self._scale,)
        # Accelerate takes a fused step, which skips itself, for one that was applied; the loss scale falls anyway.
        has_fallen = before is not None and self._scale is not None and self._scale < before
        skipped = has_fallen or getattr(optimizer, "step_was_skipped", False)
        self.steps.add(optimizer, applied=not skipped, loss_scales=scales)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the figures to a log of losses."""
        if logs is not None and "loss" in logs:
            logs.update(self.steps.figures())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the record, and the guards."""
        self._end()

    def _end(self) -> None:
        self.steps.close()
        if self._guards is not None:
            self._guards.remove()
            self._guards = None


def _scale_of(optimizer: Any) -> float | None:
    """Return the loss scale of Accelerate's optimizer; None if it has none."""
    scaler = getattr(optimizer, "scaler", None)
    return None if scaler is None else float(scaler.get_scale())
