"""Handing finished records to a tracker of experiments: one method, and the trackers that have it."""

from __future__ import annotations

import abc
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from ampcompare.base.errors import ConfigError, EnvironmentUnfit
from ampcompare.records.comparison import Comparison

__all__ = ["TRACKERS", "Exporter", "Tracker", "make_exporter"]


class Exporter(abc.ABC):
    """Writes records to a tracker; made with its folder, a receiver of notes, and a name for all runs together.

    Attributes:
        destination: where they went, if that is not the folder; "" if it is.
    """

    destination: str = ""

    @abc.abstractmethod
    def write(self, comparison: Comparison, folder: Path) -> None:
        """Write the records of a comparison whose run directory is `folder`, except those that are there already.

        Raises:
            EnvironmentUnfit: the tracker refuses them.
        """


@dataclass(frozen=True)
class Tracker:
    """Where an exporter is implemented.

    Attributes:
        home: `module:class`.
        package: that it imports.
        install: what pip calls it.
    """

    home: str
    package: str
    install: str


TRACKERS = {
    "tensorboard": Tracker("ampcompare.report.tensorboard:EventFiles", "tensorboard", "tensorboard"),
    "wandb": Tracker("ampcompare.report.wandb_runs:WandbRuns", "wandb", "wandb"),
    "mlflow": Tracker("ampcompare.report.mlflow_runs:MlflowRuns", "mlflow", "mlflow-skinny"),
}


def make_exporter(name: str, folder: Path, note: Callable[[str], None], project: str) -> Exporter:
    """Return the exporter to a tracker.

    Args:
        name: of `TRACKERS`.
        folder: where it writes.
        note: receives a line about each record that is not written.
        project: what the tracker calls all runs together.

    Raises:
        EnvironmentUnfit: its package is not installed.
        ConfigError: the folder cannot be made or written.
    """
    tracker = TRACKERS[name]
    if find_spec(tracker.package) is None:
        raise EnvironmentUnfit(
            f"--to {name} needs {tracker.package}, which this environment does not have; "
            f"pip install {tracker.install}, or the extra {name}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}; choose another --output") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"no files can be written to {folder}; choose another --output")
    module, _, attribute = tracker.home.partition(":")
    made = getattr(importlib.import_module(module), attribute)
    return cast(Exporter, made(folder, note) if name == "tensorboard" else made(folder, note, project))
