"""From the name of a task to the task."""

from __future__ import annotations

import importlib
from typing import Any

from ampcompare.base.errors import ConfigError
from ampcompare.runs.settings.recipe import Recipe
from ampcompare.tasks.catalog import task_path
from ampcompare.tasks.data import Data
from ampcompare.tasks.factory import blamed, resolve_factory
from ampcompare.tasks.task import Task

__all__ = ["make_task"]


def make_task(recipe: Recipe) -> Task:
    """Build the task of a recipe, with its data.

    Raises:
        ConfigError: there is none of that name, or the user's factory returned something else.
        EnvironmentUnfit: a package or a download is missing.
    """
    path, ships = task_path(recipe.task)
    if ships:
        module, _, name = path.partition(":")
        made: Task = getattr(importlib.import_module(module), name)(recipe)
        return made
    factory = resolve_factory(path)
    with blamed(path, "calling it"):
        task: Any = factory(recipe)
    if not isinstance(task, Task):
        raise ConfigError(f"factory {path} returned a {type(task).__name__}; it must return an ampcompare.tasks.Task")
    _check(path, task)
    return task


def _check(path: str, task: Task) -> None:
    """Check that a user's task has what the contract asks for."""
    metrics = getattr(task, "metrics", ())
    if not metrics:
        raise ConfigError(f"task {path} has no metrics; set the class attribute metrics to one or more Metric")
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names):
        raise ConfigError(f"task {path} has two metrics of one name: {', '.join(names)}")
    if not isinstance(getattr(task, "data", None), Data):
        raise ConfigError(f"task {path} has no data; set self.data to a Data, such as TensorData.of(...)")
