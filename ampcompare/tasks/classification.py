"""Classification of images or vectors: cross entropy, top-1 and top-5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError
from ampcompare.records.metric import TOP1, TOP5
from ampcompare.settings.recipe import ModelConfig, Recipe
from ampcompare.tasks.data import LabeledData
from ampcompare.tasks.load import load_data
from ampcompare.tasks.metrics import CLASSIFICATION
from ampcompare.tasks.models import build_model, fixed_channels
from ampcompare.tasks.task import Sums, Task
from ampcompare.tasks.views import make_views

__all__ = ["Classification", "classification", "classification_loss"]

CLASSES = "samples by class"


def classification_loss(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross entropy.

    Args:
        logits: (batch, classes), in the dtype of the model; nothing is cast, so that the arm's own rules apply.
        labels: (batch,), int64.
        label_smoothing: part of the target spread over all classes, in [0, 1).
    """
    # Looked up on the module at each call: O1 replaces the function there.
    return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)


def classification(recipe: Recipe) -> Classification:
    """Return the task of a recipe, with its data.

    Raises:
        AmpCompareError: data, model or views of the recipe cannot be had.
    """
    data = load_data(
        recipe.data.name,
        seed=recipe.seed,
        data_dir=recipe.data.dir,
        download=recipe.data.download,
        image_size=recipe.data.image_size,
        channels=fixed_channels(recipe.model.arch),
        train_size=recipe.data.train_size,
        val_size=recipe.data.val_size,
        augment=recipe.data.augment,
    )
    return Classification(data, recipe.model, label_smoothing=recipe.label_smoothing, tta=recipe.tta)


class Classification(Task):
    """One model that gives logits (batch, classes) for a batch of samples and labels.

    Args:
        data: samples and labels.
        model: which one is built for them.
        label_smoothing: part of the target spread over all classes, in [0, 1).
        tta: further views of an image whose logits are averaged with its own: none, flips or shifts.
    """

    metrics = CLASSIFICATION
    unit = "images"
    data: LabeledData

    def __init__(
        self, data: LabeledData, model: ModelConfig | None = None, *, label_smoothing: float = 0.0, tta: str = "none"
    ) -> None:
        self.data = data
        self._model = model or ModelConfig()
        self._label_smoothing = label_smoothing
        self._views = make_views(tta, data.sample_shape)

    def make_models(self) -> Sequence[nn.Module]:
        model = build_model(
            self._model.arch,
            num_classes=self.data.num_classes,
            sample_shape=self.data.sample_shape,
            model_args=self._model.args,
        )
        return [model]

    def loss(self, models: Sequence[nn.Module], batch: tuple[Tensor, Tensor]) -> Tensor:
        samples, labels = batch
        logits = models[0](samples)
        if not isinstance(logits, Tensor):
            raise ConfigError(
                f"the model returned a {type(logits).__name__}; classification needs one tensor (batch, classes)"
            )
        return classification_loss(logits, labels, label_smoothing=self._label_smoothing)

    def predict(self, models: Sequence[nn.Module], batch: tuple[Tensor, Tensor]) -> Tensor:
        samples, model = batch[0], models[0]
        logits: Tensor = model(samples)
        if not self._views:
            return logits
        return torch.stack([logits.float(), *(model(view(samples)).float() for view in self._views)]).mean(0)

    def measure(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        labels = batch[1]
        best = _best(outputs)
        hits = best == labels[:, None]
        return {
            TOP1.name: hits[:, 0],
            TOP5.name: hits.any(1),
            "loss": F.cross_entropy(outputs, labels, reduction="none"),
            CLASSES: labels[:, None] == torch.arange(self.data.num_classes, device=labels.device),
        }

    def answers(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return _best(outputs)[:, 0]

    def chance(self, sums: Sums, samples: int) -> float:
        return float(sums[CLASSES].max()) / samples

    def labels(self, batch: tuple[Any, Tensor]) -> Tensor:
        return batch[1]


def _best(logits: Tensor) -> Tensor:
    """Return the five best classes of each sample, or all: int64 (batch, classes)."""
    return logits.topk(min(5, logits.shape[1]), dim=1).indices  # of equal logits it may take others than `argmax`
