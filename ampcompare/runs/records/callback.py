"""Callbacks that follow runs in progress: one call for each step, evaluation and record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ampcompare.runs.records.evaluation import EpochResult
from ampcompare.runs.records.run import RunRecord, StepRecord
from ampcompare.runs.settings.config import RunConfig

__all__ = ["Callback", "CellInfo"]


@dataclass(frozen=True)
class CellInfo:
    """The cell that a callback is called for.

    Attributes:
        label: row of the tables: the arm, and what is varied.
        config: all settings.
        folder: with the files of the cell.
    """

    label: str
    config: RunConfig
    folder: Path

    @property
    def arm(self) -> str:
        """The arm, such as "apex:O2"."""
        return self.config.arm

    @property
    def seed(self) -> int:
        """The seed."""
        return self.config.recipe.seed

    @property
    def id(self) -> str:
        """The name of the cell in its run directory."""
        return self.config.digest()


class Callback:
    """Base class of callbacks: override the methods of interest.

    All are called in the process that called `run` or `compare`, in its main thread, never in the one that trains: an
    update waits for no callback. What they receive cannot be changed. Steps come in blocks, once their losses were
    read from the device (setting `drain_every`). Each step and each epoch comes once and in order, including those
    before the checkpoint that a run resumed from. With several cells at a time, their calls are interleaved.
    """

    def on_step(self, cell: CellInfo, step: StepRecord) -> None:
        """An update was made: loss, loss scales, whether it was skipped, learning rate, gradient norm, seconds."""

    def on_epoch(self, cell: CellInfo, epoch: EpochResult) -> None:
        """An epoch was trained and evaluated; comes after its steps."""

    def on_end(self, cell: CellInfo, record: RunRecord) -> None:
        """The cell has ended, maybe failed or interrupted: see the record's `status`. Comes last."""
