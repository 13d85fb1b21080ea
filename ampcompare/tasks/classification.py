"""Classification of images or vectors: cross entropy, top-1 and top-5, test-time augmentation by further views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError, UnsupportedCombination
from ampcompare.results.records.metric import TOP1, TOP5
from ampcompare.settings.recipe import ModelConfig, Recipe
from ampcompare.tasks.catalog import CLASSIFICATION
from ampcompare.tasks.data import LabeledData
from ampcompare.tasks.image_data import load_data
from ampcompare.tasks.models import build_model, fixed_channels
from ampcompare.tasks.task import Sums, Task

View = Callable[[Tensor], Tensor]


def make_shifted_and_mirrored_views(name: str, sample_shape: tuple[int, ...]) -> Sequence[View]:
    """Return the further views of a batch of images (N, C, H, W): mirrored, or moved by a pixel, the edge repeated."""
    if name == "none":
        return ()
    if len(sample_shape) != 3:
        raise UnsupportedCombination(
            f"--tta {name} moves images (channels, height, width), and a sample has shape {tuple(sample_shape)}; "
            "use --tta none"
        )
    if name == "flips":
        return (_flip_images,)
    return tuple(_ImageShift(rows, columns) for rows, columns in ((1, 0), (-1, 0), (0, 1), (0, -1)))


def _flip_images(images: Tensor) -> Tensor:
    return images.flip(-1)


class _ImageShift:
    """Moves images by whole pixels, down and to the right."""

    def __init__(self, rows: int, columns: int) -> None:
        self._moves = {-2: rows, -1: columns}

    def __call__(self, images: Tensor) -> Tensor:
        for dim, move in self._moves.items():
            size = images.shape[dim]
            indices = (torch.arange(size, device=images.device) - move).clamp(0, size - 1)
            images = images.index_select(dim, indices)
        return images


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
        label_smoothing: part of the target spread over all classes, in [0, 1).
        tta: further views of an image whose logits are averaged with its own: none, flips or shifts.
    """

    metrics = CLASSIFICATION
    unit = "images"
    data: LabeledData

    def __init__(
        self,
        data: LabeledData,
        model: ModelConfig | None = None,
        *,
        label_smoothing: float = 0.0,
        tta: str = "none",
    ) -> None:
        self.data = data
        self._model = model or ModelConfig()
        self._label_smoothing = label_smoothing
        self._views = make_shifted_and_mirrored_views(tta, data.sample_shape)

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
        best = _five_best_classes(outputs)
        hits = best == labels[:, None]
        return {
            TOP1.name: hits[:, 0],
            TOP5.name: hits.any(1),
            "loss": F.cross_entropy(outputs, labels, reduction="none"),
            CLASSES: labels[:, None] == torch.arange(self.data.num_classes, device=labels.device),
        }

    def answers(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return _five_best_classes(outputs)[:, 0]

    def chance(self, sums: Sums, samples: int) -> float:
        return float(sums[CLASSES].max()) / samples

    def labels(self, batch: tuple[Any, Tensor]) -> Tensor:
        return batch[1]


def _five_best_classes(logits: Tensor) -> Tensor:
    """Return the five best classes of each sample, or all: int64 (batch, classes)."""
    # of equal logits it may take others than `argmax`
    return logits.topk(min(5, logits.shape[1]), dim=1).indices
