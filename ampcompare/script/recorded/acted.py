"""Record on what share of a script's forward passes and steps the arm acted."""

from __future__ import annotations

from typing import Any

from ampcompare.script.legacy.record.recorder import Recorder

__all__ = ["Acted"]


class Acted:
    """Counts, and adds one row to the record when it ends: `{"kind": "acted", "forwards", "cast", "steps", "scaled"}`.

    Attributes:
        forwards: calls of modules that are no part of another call, and whose weights an optimizer has; those of
            evaluations count too, and those that a checkpoint repeats during the backward pass do not.
        cast: those of `forwards` in which the arm's casts were on at some time: its autocast block, O1's casts, or
            weights that it has cast. 0 under `fp32`, `apex:O0` and `script`.
        steps: of all optimizers, skipped ones too.
        scaled: those of `steps` after a backward pass of a loss that was scaled, be it by 1 (O4, O5). 0 under an arm
            without a loss scaler.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.forwards = self.cast = self.steps = self.scaled = 0
        self._is_scaled = False  # a loss since the last step
        recorder.after_row(self._row)
        recorder.before_close(self._end)

    def forward(self, *, cast: bool) -> None:
        """Count a forward pass that has ended."""
        self.forwards += 1
        self.cast += cast

    def _row(self, row: dict[str, Any]) -> None:
        if row["kind"] == "backward":
            self._is_scaled = row["scale_before"] is not None
        elif row["kind"] == "step":
            self.steps += 1
            self.scaled += self._is_scaled

    def _end(self) -> None:
        self._recorder.add_row(
            {
                "kind": "acted",
                "forwards": self.forwards,
                "cast": self.cast,
                "steps": self.steps,
                "scaled": self.scaled,
            }
        )
