"""Default recipe of each built-in task; for `classification`, the fields' own defaults."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

__all__ = ["DEFAULT_TASK", "with_task_defaults"]

DEFAULT_TASK = "classification"
OWN = {"data": {"name": "task"}, "model": {"arch": "task"}}  # of a task from elsewhere, which chooses both itself
DEFAULTS: dict[str, dict[str, Any]] = {
    DEFAULT_TASK: {},
    "lm": {
        "data": {"name": "grammar"},
        "model": {"arch": "gpt"},
        "optimizer": {"name": "adamw", "lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
        "epochs": 5,
        "batch_size": 32,
        "clip_grad": 1.0,
    },
    "segmentation": {
        "data": {"name": "shapes"},
        "model": {"arch": "unet"},
        "optimizer": {"name": "adamw", "lr": 5e-3},
        "epochs": 12,
        "batch_size": 32,
    },
    "detection": {
        "data": {"name": "shapes"},
        "model": {"arch": "centernet"},
        "optimizer": {"name": "adamw", "lr": 5e-3},
        "epochs": 20,
        "batch_size": 32,
    },
    "gan": {
        "data": {"name": "gaussians"},
        "model": {"arch": "mlp"},
        "optimizer": {"name": "adam", "lr": 2e-3, "betas": (0.5, 0.99), "weight_decay": 0.0},
        "epochs": 48,
        "batch_size": 128,
    },
    "regression": {
        "data": {"name": "diabetes"},
        "model": {"arch": "mlp"},
        "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1},
        "epochs": 30,
        "batch_size": 32,
    },
}
# A given value invalidates a default that determines the same quantity in another way.
RIVALS = {("optimizer", "lr"): ("optimizer", "lr_base"), ("batch_size",): ("global_batch_size",)}


def with_task_defaults(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe with the defaults of its task for those that are not given."""
    task = recipe.get("task", DEFAULT_TASK)
    filled = copy.deepcopy(dict(recipe))
    if not isinstance(task, str):
        return filled
    _fill(filled, DEFAULTS.get(task, OWN), recipe, ())
    return filled


def _fill(values: dict[str, Any], defaults: Mapping[str, Any], given: Mapping[str, Any], path: tuple[str, ...]) -> None:
    for name, default in defaults.items():
        here = (*path, name)
        if isinstance(default, Mapping):
            group = values.get(name, {})
            if hasattr(group, "model_fields_set"):
                group = {field: getattr(group, field) for field in group.model_fields_set}
            # What belongs to the task's own optimizer or network means nothing to another one.
            kind = next((field for field in ("name", "arch") if field in default), "")
            is_other = isinstance(group, Mapping) and group.get(kind, default.get(kind)) != default.get(kind)
            if isinstance(group, Mapping) and not is_other:
                values[name] = dict(group)
                _fill(values[name], default, given, here)
        elif name not in values and not _is_given(given, RIVALS.get(here, ())):
            values[name] = default


def _is_given(values: Any, path: tuple[str, ...]) -> bool:
    for name in path:
        values = values.get(name) if isinstance(values, Mapping) else getattr(values, name, None)
    return bool(path) and values is not None
