"""The workloads that arms are compared on: data sets, models and the loss that joins them.

Importing this package loads neither torch nor torchvision; each public name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampcompare.tasks.catalog import list_data, list_models
    from ampcompare.tasks.data import Data
    from ampcompare.tasks.load import load_data
    from ampcompare.tasks.models import build_model, fixed_channels
    from ampcompare.tasks.task import Task, classification_loss
    from ampcompare.tasks.torchvision_loader import load_torchvision

__all__ = [
    "Data",
    "Task",
    "build_model",
    "classification_loss",
    "fixed_channels",
    "list_data",
    "list_models",
    "load_data",
    "load_torchvision",
]

_MODULES = {
    "Data": "data",
    "Task": "task",
    "build_model": "models",
    "classification_loss": "task",
    "fixed_channels": "models",
    "list_data": "catalog",
    "list_models": "catalog",
    "load_data": "load",
    "load_torchvision": "torchvision_loader",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
