"""Regression: a number for each row of a table, mean squared error, RMSE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError
from ampcompare.settings.recipe import ModelConfig, Recipe
from ampcompare.tasks.catalog import REGRESSION, RMSE, explain_missing_package
from ampcompare.tasks.data import choose_indices_evenly
from ampcompare.tasks.factory import factory_errors_reported, resolve_factory
from ampcompare.tasks.in_memory import TensorData
from ampcompare.tasks.models import build_model
from ampcompare.tasks.task import Sums, Task

HOLDOUT = 4  # every fourth row is for validation

Part = tuple[Tensor, Tensor]


def regression(recipe: Recipe) -> Regression:
    name = recipe.data.name
    train, val = load_diabetes_table() if name == "diabetes" else _parts_from_factory(name)
    train = _evenly_chosen_subset(train, recipe.data.train_size, f"the training part of {name}")
    val = _evenly_chosen_subset(val, recipe.data.val_size, f"the validation part of {name}")
    return Regression(train, val, recipe.model, name=name, seed=recipe.seed)


class Regression(Task):
    """One model that gives a number (batch, 1) for each float32 sample (batch, ...); RMSE has the targets' unit.

    Samples and targets are standardized by the training part, and what the model gives is a standardized target.
    """

    metrics = REGRESSION

    def __init__(
        self, train: Part, val: Part, model: ModelConfig | None = None, *, name: str = "table", seed: int = 0
    ) -> None:
        self._model = model or ModelConfig(arch="mlp")
        samples, targets = (_mean_and_deviation(part) for part in train)
        self._unit = targets[1].item()
        parts = [((x - samples[0]) / samples[1], (y - targets[0]) / targets[1]) for x, y in (train, val)]
        self.data = TensorData.of(name, *parts, seed=seed)
        self._shape = tuple(train[0].shape[1:])

    def make_models(self) -> Sequence[nn.Module]:
        return [
            build_model(
                self._model.arch, num_classes=1, sample_shape=self._shape, model_args=self._model.args
            )
        ]

    def loss(self, models: Sequence[nn.Module], batch: Part) -> Tensor:
        # Looked up on the module at each call: O1 replaces the function there.
        return F.mse_loss(models[0](batch[0]).flatten(), batch[1])

    def measure(self, outputs: Tensor, batch: Part) -> Mapping[str, Tensor]:
        targets = batch[1].double()
        return {"loss": (outputs.flatten().double() - targets).square(), "squares": targets.square()}

    def values(self, sums: Sums, samples: int) -> dict[str, float]:
        return {RMSE.name: self._rmse(sums["loss"], samples)}

    def chance(self, sums: Sums, samples: int) -> float:
        """Return the RMSE of always guessing the mean of the training targets."""
        return self._rmse(sums["squares"], samples)

    def _rmse(self, squares: NDArray[np.float64], samples: int) -> float:
        return self._unit * math.sqrt(float(squares) / samples)


def load_diabetes_table() -> tuple[Part, Part]:
    """Load scikit-learn's table of 442 patients: ten measurements, and how far their disease went within a year.

    Every fourth patient in the order of the targets is for validation, so that both parts have all of their range.
    Source: Efron et al., Least Angle Regression, Annals of Statistics 2004.
    """
    with explain_missing_package("diabetes needs", "scikit-learn"):
        from sklearn.datasets import load_diabetes
    table = load_diabetes()
    samples, targets = (torch.from_numpy(part).float() for part in (table.data, table.target))
    held_out = torch.zeros(len(targets), dtype=torch.bool)
    held_out[torch.argsort(targets, stable=True)[::HOLDOUT]] = True
    return (samples[~held_out], targets[~held_out]), (samples[held_out], targets[held_out])


def _parts_from_factory(path: str) -> tuple[Part, Part]:
    factory = resolve_factory(path)
    with factory_errors_reported(path, "calling it"):
        parts: Any = factory()
        train, val = ((torch.as_tensor(x).float(), torch.as_tensor(y).float().flatten()) for x, y in parts)
    for samples, targets in (train, val):
        if len(samples) != len(targets) or not len(targets):
            raise ConfigError(
                f"factory {path} returned {len(samples)} samples and {len(targets)} targets in one part"
            )
    return train, val


def _evenly_chosen_subset(part: Part, size: int | None, what: str) -> Part:
    rows = choose_indices_evenly(len(part[1]), size, what=what)
    return part[0][rows], part[1][rows]


def _mean_and_deviation(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation over samples; a deviation of 0 becomes 1."""
    deviation = values.std(0, correction=0)
    return values.mean(0), torch.where(deviation > 0, deviation, 1.0)
