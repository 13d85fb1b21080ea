"""The tasks that arms are compared on: data, models, losses and metrics.

Importing this package loads neither torch nor torchvision; each public name is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampcompare.results.records.metric import Metric
    from ampcompare.tasks.catalog import list_data, list_models
    from ampcompare.tasks.classification import Classification, classification_loss
    from ampcompare.tasks.data import Data, LabeledData
    from ampcompare.tasks.image_data import load_data
    from ampcompare.tasks.in_memory import TensorData
    from ampcompare.tasks.models import build_model, fixed_channels
    from ampcompare.tasks.task import Phase, Task
    from ampcompare.tasks.torchvision_loader import load_torchvision

__all__ = [
    "Classification",
    "Data",
    "LabeledData",
    "Metric",
    "Phase",
    "Task",
    "TensorData",
    "build_model",
    "classification_loss",
    "fixed_channels",
    "list_data",
    "list_models",
    "load_data",
    "load_torchvision",
]

_NAMES = {
    "ampcompare.results.records.metric": ("Metric",),
    "ampcompare.tasks.catalog": ("list_data", "list_models"),
    "ampcompare.tasks.classification": ("Classification", "classification_loss"),
    "ampcompare.tasks.data": ("Data", "LabeledData"),
    "ampcompare.tasks.in_memory": ("TensorData",),
    "ampcompare.tasks.image_data": ("load_data",),
    "ampcompare.tasks.models": ("build_model", "fixed_channels"),
    "ampcompare.tasks.task": ("Phase", "Task"),
    "ampcompare.tasks.torchvision_loader": ("load_torchvision",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
