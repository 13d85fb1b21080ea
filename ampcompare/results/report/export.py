"""Handing finished records to a tracker of experiments: one method, and the trackers that have it."""

import abc
import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from ampcompare.base.errors import ConfigError, EnvironmentUnfit
from ampcompare.base.files.run_files import CellFile, file_of_cell
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.step import StepRecord, iter_steps


class Exporter(abc.ABC):
    """Writes records to a tracker.

    Args:
        folder: where its files go.
        note: receives a line about each record that is not written.
        project: what the tracker calls all runs together.

    Attributes:
        destination: where they went, if that is not the folder; "" if it is.
    """

    destination: str = ""

    def __init__(self, folder: Path, note: Callable[[str], None], project: str = "") -> None:
        self._folder = folder
        self._note = note
        self._project = project

    @abc.abstractmethod
    def export_records(self, comparison: Comparison, folder: Path) -> None:
        """Write the records of a comparison whose run directory is `folder`, except those that are there already.

        Raises:
            EnvironmentUnfit: the tracker refuses them.
        """


# The class of each, the package that it imports, and what pip calls that.
TRACKERS = {
    "tensorboard": (
        "ampcompare.results.report.tensorboard:TensorBoardExporter",
        "tensorboard",
        "tensorboard",
    ),
    "wandb": ("ampcompare.results.report.wandb_runs:WandbExporter", "wandb", "wandb"),
    "mlflow": ("ampcompare.results.report.mlflow_runs:MlflowExporter", "mlflow", "mlflow-skinny"),
}


def make_exporter(name: str, folder: Path, note: Callable[[str], None], project: str = "") -> Exporter:
    """Return the exporter to a tracker.

    Args:
        name: one of `TRACKERS`.
        folder: gets the files of trackers that write some; it is made if it is missing.
        note: receives a line about each record that is not written.
        project: what the tracker calls all runs together; "" for its default.

    Raises:
        EnvironmentUnfit: its package is not installed.
        ConfigError: there is no such tracker, or the folder cannot be made or written.
    """
    if name not in TRACKERS:
        raise ConfigError(f"there is no tracker {name!r}; give one of {', '.join(TRACKERS)}")
    home, package, install = TRACKERS[name]
    if find_spec(package) is None:
        raise EnvironmentUnfit(
            f"runs for {name} need {package}, which this environment does not have; "
            f"pip install {install}, or the extra {name}"
        )
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK) or not folder.is_dir():
        raise ConfigError(f"no files can be written to {folder}; choose another folder")
    module, _, attribute = home.partition(":")
    made: Exporter = getattr(importlib.import_module(module), attribute)(folder, note, project)
    return made


Point = tuple[float, int, dict[str, float]]


def points_of_record(record: RunRecord, folder: Path) -> Iterator[Point]:
    """Yield seconds of training so far, a step, and values by name; evaluations stand at the last step before them.

    Args:
        folder: the run directory.

    Raises:
        RecordError: the steps cannot be read.
    """
    steps = folder / file_of_cell(record.cell, CellFile.STEPS)
    if not steps.exists():
        return
    epochs = {epoch.epoch: epoch for epoch in record.summary.epochs}
    skipped = 0
    elapsed = 0.0
    last = None
    for step in iter_steps(steps):
        if last is not None and last.epoch != step.epoch and last.epoch in epochs:
            yield elapsed, last.step, _tracked_values_of_epoch(epochs.pop(last.epoch), record)
        skipped += not all(step.applied)
        elapsed += step.seconds + step.data_seconds
        yield elapsed, step.step, _tracked_values_of_step(step, skipped)
        last = step
    if last is not None and last.epoch in epochs:
        yield elapsed, last.step, _tracked_values_of_epoch(epochs[last.epoch], record)


def _tracked_values_of_step(step: StepRecord, skipped: int) -> dict[str, float]:
    # an unscaled loss is a loss times 1, and so has the name that all have
    scales = step.loss_scales or (1.0,)
    values = {"train/loss": step.loss, "train/skipped": float(skipped), "time/step_seconds": step.seconds}
    values |= {f"train/loss_scale{f'_{index}' if index else ''}": scale for index, scale in enumerate(scales)}
    known = {"train/lr": step.lr, "train/grad_norm": step.grad_norm}
    return values | {name: value for name, value in known.items() if value is not None}


def _tracked_values_of_epoch(epoch: EpochResult, record: RunRecord) -> dict[str, float]:
    values = {
        f"eval/{metric.identifier}": epoch.values[metric.name]
        for metric in record.metrics
        if metric.name in epoch.values
    }
    return values if epoch.loss is None else {**values, "eval/loss": epoch.loss}
