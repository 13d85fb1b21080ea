"""Callbacks that follow runs: one call for each step, evaluation and record, from the files that cells write.

The training processes are not involved.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcompare.base.errors import AmpCompareError, ConfigError
from ampcompare.base.files.read import parse_json
from ampcompare.base.files.run_files import CellFile
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.observer import Observer, Outline
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.run import RunRecord, StepRecord
from ampcompare.results.records.step import parse_step
from ampcompare.settings.config import RunConfig
from ampcompare.tasks.factory import blame_factory, resolve_factory

__all__ = ["Callback", "CellInfo", "Follower", "following", "load_callback"]


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


def load_callback(text: str) -> Callback:
    """Return what `package.module:factory`, called without arguments, returns; a subclass of `Callback` is a factory.

    Raises:
        ConfigError: it cannot be imported, raises, or returns something else.
    """
    factory = resolve_factory(text)
    with blame_factory(text, "calling it"):
        made = factory()
    if not isinstance(made, Callback):
        raise ConfigError(f"factory {text} returned a {type(made).__name__}; it must return an ampcompare.Callback")
    return made


def following(observer: Observer, callbacks: Sequence[Callback]) -> Observer:
    """Return an observer that also calls callbacks; the same observer if there are none."""
    return Follower(observer, callbacks) if callbacks else observer


class Follower(Observer):
    """Passes everything on to another observer, and calls callbacks for each cell that runs, not for reused ones.

    Raises:
        ConfigError: a callback raised; its cause is chained.
    """

    def __init__(self, observer: Observer, callbacks: Sequence[Callback]) -> None:
        self._observer = observer
        self._callbacks = callbacks
        self._outline: Outline | None = None
        self._cells: dict[int, _Followed] = {}
        self.place, self.preflight, self.note = observer.place, observer.preflight, observer.note  # type: ignore[method-assign]

    def plan(self, outline: Outline) -> None:
        self._outline = outline
        self._observer.plan(outline)

    def begin(self, config: RunConfig, number: int, total: int) -> None:
        self._observer.begin(config, number, total)
        assert self._outline is not None
        label, folder = self._outline.labels[number - 1], RunDirectory(self._outline.folder).cell(config)
        self._cells[number] = _Followed(CellInfo(label, config, folder), self._callbacks)

    def progress(self, number: int, progress: Progress) -> None:
        self._observer.progress(number, progress)
        self._cells[number].read()

    def end(self, record: RunRecord, *, reused: bool) -> None:
        number = next(at for at, cell in self._cells.items() if cell.cell.id == record.cell)
        cell = self._cells.pop(number)
        if not reused:
            cell.end(record)
        self._observer.end(record, reused=reused)


class _Followed:
    """A running cell: calls the callbacks for what its process has written, each step and epoch once and in order."""

    def __init__(self, cell: CellInfo, callbacks: Sequence[Callback]) -> None:
        self.cell = cell
        self._callbacks = callbacks
        self._steps = _Tail(cell.folder / CellFile.STEPS, parse_step)
        self._epochs = _Tail(cell.folder / CellFile.EPOCHS, lambda line: EpochResult.model_validate(parse_json(line)))
        self._waiting: list[EpochResult] = []
        self._next_step = self._next_epoch = 0

    def read(self) -> None:
        """Call for new steps, before those of a later epoch for its evaluation, and for evaluations after all steps."""
        complete = [*self._waiting, *self._epochs.read()]  # before the steps: theirs are all written
        steps = self._steps.read()
        self._waiting = self._epochs.read()
        for step in steps:
            if step.step >= self._next_step:
                self._give(epoch for epoch in [*complete, *self._waiting] if epoch.epoch < step.epoch)
                self._next_step = step.step + 1
                self._call("on_step", step)
        self._give(complete)

    def end(self, record: RunRecord) -> None:
        """Call for what is new, for epochs that are only in the record, and for the end."""
        self.read()
        self._give(record.summary.epochs)
        self._call("on_end", record)

    def _give(self, epochs: Iterable[EpochResult]) -> None:
        for epoch in epochs:
            if epoch.epoch >= self._next_epoch:
                self._next_epoch = epoch.epoch + 1
                self._call("on_epoch", epoch)

    def _call(self, method: str, event: Any) -> None:
        for callback in self._callbacks:
            try:
                getattr(callback, method)(self.cell, event)
            except AmpCompareError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"callback {type(callback).__name__}: {method} raised {type(error).__name__}: {error}; fix it or "
                    f"leave it out; finished cells are kept"
                ) from error


class _Tail:
    """Reads the lines appended to a file, and all lines again once the file was replaced."""

    def __init__(self, path: Path, parse: Callable[[str], Any]) -> None:
        self._path = path
        self._parse = parse
        self._inode = -1
        self._offset = 0

    def read(self) -> list[Any]:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            now = os.fstat(file.fileno())
            if now.st_ino != self._inode or now.st_size < self._offset:
                self._inode, self._offset = now.st_ino, 0
            file.seek(self._offset)
            lines = file.read().split(b"\n")[:-1]  # the rest is a line that is being written
            self._offset += sum(len(line) + 1 for line in lines)
            return [self._parse(line.decode()) for line in lines]
        return []
