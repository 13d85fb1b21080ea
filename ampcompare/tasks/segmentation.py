"""Segmentation: a class for each pixel, cross entropy, mean IoU and pixel accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError
from ampcompare.settings.recipe import ModelConfig, Recipe
from ampcompare.tasks.catalog import MEAN_IOU, PIXEL_ACCURACY, SEGMENTATION
from ampcompare.tasks.data import SampleOptions
from ampcompare.tasks.in_memory import TensorData
from ampcompare.tasks.models import build_model, fixed_channels
from ampcompare.tasks.shapes import CLASSES, make_shape_images
from ampcompare.tasks.task import Sums, Task


def segmentation(recipe: Recipe) -> Segmentation:
    data = make_shape_images(
        SampleOptions.from_recipe(recipe, fixed_channels(recipe.model.arch, "segmentation"))
    )
    return Segmentation(data, CLASSES, recipe.model, label_smoothing=recipe.label_smoothing)


class Segmentation(Task):
    """One model that gives logits (batch, classes, height, width) for images, or a dict with them as `out`."""

    metrics = SEGMENTATION
    unit = "images"
    data: TensorData

    def __init__(
        self,
        data: TensorData,
        num_classes: int,
        model: ModelConfig | None = None,
        *,
        label_smoothing: float = 0.0,
    ) -> None:
        self.data = data
        self.num_classes = num_classes
        self._model = model or ModelConfig(arch="unet")
        self._label_smoothing = label_smoothing

    def make_models(self) -> Sequence[nn.Module]:
        return [
            build_model(
                self._model.arch,
                kind="segmentation",
                num_classes=self.num_classes,
                sample_shape=tuple(self.data.train[0].shape[1:]),
                model_args=self._model.args,
            )
        ]

    def loss(self, models: Sequence[nn.Module], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(
            self._logits(models[0], batch[0]), batch[1], label_smoothing=self._label_smoothing
        )

    def predict(self, models: Sequence[nn.Module], batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._logits(models[0], batch[0])

    def measure(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        classes = batch[1]
        found = outputs.argmax(1)
        numbers = torch.arange(self.num_classes, device=classes.device)[:, None, None]
        truth, guess = (part[:, None] == numbers for part in (classes, found))
        return {
            "loss": F.cross_entropy(outputs, classes, reduction="none").mean((1, 2)),
            PIXEL_ACCURACY.name: (found == classes).float().mean((1, 2)),
            "intersection": (truth & guess).sum((2, 3)),
            "union": (truth | guess).sum((2, 3)),
            "pixels": truth.sum((2, 3)),
        }

    def answers(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return outputs.argmax(1)

    def values(self, sums: Sums, samples: int) -> dict[str, float]:
        # A class that is neither there nor predicted has no IoU.
        seen = sums["union"] > 0
        by_class = sums["intersection"][seen] / sums["union"][seen]
        return {
            MEAN_IOU.name: float(by_class.mean()),
            PIXEL_ACCURACY.name: float(sums[PIXEL_ACCURACY.name]) / samples,
        }

    def chance(self, sums: Sums, samples: int) -> float:
        """Return the mean IoU where every pixel has the most frequent class."""
        there = sums["pixels"] > 0
        return float(sums["pixels"].max() / sums["pixels"].sum()) / int(there.sum())

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        outputs = model(images)
        logits = outputs["out"] if isinstance(outputs, Mapping) and "out" in outputs else outputs
        if not isinstance(logits, Tensor) or logits.dim() != 4:
            raise ConfigError(
                f"the model returned a {type(outputs).__name__}; segmentation needs one tensor "
                "(batch, classes, height, width), or a dict with it as 'out'"
            )
        return logits
