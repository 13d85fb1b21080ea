"""Detection: a box and a class for each object, the model's own losses, average precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ampcompare.base.errors import ConfigError
from ampcompare.settings.recipe import ModelConfig, Recipe
from ampcompare.tasks.boxes import average_precision, mask_of_right_detections
from ampcompare.tasks.catalog import AP50, AP75, DETECTION
from ampcompare.tasks.data import SampleOptions
from ampcompare.tasks.in_memory import TensorData
from ampcompare.tasks.models import build_model, fixed_channels
from ampcompare.tasks.shapes import CLASSES, make_boxed_shape_images
from ampcompare.tasks.task import Sums, Task

OVERLAPS = {AP50.name: 0.5, AP75.name: 0.75}
INTERVALS = 500  # of scores from 0 to 1, within which detections are not ordered

Detections = Sequence[Mapping[str, Tensor]]


def detection(recipe: Recipe) -> Detection:
    data = make_boxed_shape_images(
        SampleOptions.from_recipe(recipe, fixed_channels(recipe.model.arch, "detection"))
    )
    return Detection(data, CLASSES, recipe.model)


class Detection(Task):
    """One model with the interface of torchvision's detectors.

    In training mode it takes a list of images and a list of dicts with `boxes` and `labels`, and returns a dict of
    losses, which are added up. In evaluation mode it takes images, and returns for each a dict with `boxes`, `labels`
    and `scores`. Batches are those of `make_boxed_shape_images`; class 0 is the background.

    Average precision is the area under the curve of precision over recall, with precision made to fall; it is the mean
    over the classes that are there. Scores are counted in 500 intervals, so that counts of all ranks can be added up.
    """

    metrics = DETECTION
    unit = "images"
    data: TensorData

    def __init__(self, data: TensorData, num_classes: int, model: ModelConfig | None = None) -> None:
        self.data = data
        self.num_classes = num_classes
        self._model = model or ModelConfig(arch="centernet")

    def make_models(self) -> Sequence[nn.Module]:
        return [
            build_model(
                self._model.arch,
                kind="detection",
                num_classes=self.num_classes,
                sample_shape=tuple(self.data.train["image"].shape[1:]),
                model_args=self._model.args,
            )
        ]

    def loss(self, models: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> Tensor:
        losses = models[0](list(batch["image"]), _targets_of_images(batch))
        if not isinstance(losses, Mapping) or not losses:
            raise ConfigError(
                f"the model returned a {type(losses).__name__} in training mode; detection needs a dict of losses"
            )
        return torch.stack(list(losses.values())).sum()

    def predict(self, models: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> Any:
        return models[0](list(batch["image"]))

    def measure(self, outputs: Detections, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        boxes, labels, scores = (_pad_to_one_tensor(outputs, name) for name in ("boxes", "labels", "scores"))
        order = scores.argsort(dim=1, descending=True, stable=True)
        labels, scores = labels.gather(1, order), scores.gather(1, order)
        boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
        classes = torch.arange(1, self.num_classes, device=labels.device)
        interval = (scores.clamp(0, 1) * INTERVALS).long().clamp(max=INTERVALS - 1)
        at_interval = interval[..., None] == torch.arange(INTERVALS, device=interval.device)
        # bool (samples, detections, classes, intervals): whole numbers would take eight times the memory.
        place = (labels[..., None] == classes)[..., None] & at_interval[:, :, None]
        truth = batch["boxes"], batch["labels"]
        return {
            "objects": (batch["labels"][..., None] == classes).sum(1),
            "found": place.sum(1),  # (samples, classes, intervals)
            **{
                name: (place & mask_of_right_detections(boxes, labels, *truth, iou=iou)[..., None, None]).sum(
                    1
                )
                for name, iou in OVERLAPS.items()
            },
        }

    def values(self, sums: Sums, samples: int) -> dict[str, float]:
        # A class without an object has no recall.
        there = [number for number, objects in enumerate(sums["objects"]) if objects]
        values = {}
        for name in OVERLAPS:
            by_class = [
                average_precision(sums[name][number], sums["found"][number], sums["objects"][number])
                for number in there
            ]
            values[name] = sum(by_class) / len(by_class)
        return values

    def chance(self, sums: Sums, samples: int) -> float:
        """Return 0: no box that is the same in all images fits their objects."""
        return 0.0

    def labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        digits = self.num_classes ** torch.arange(batch["labels"].shape[1], device=batch["labels"].device)
        return (batch["labels"] * digits).sum(1)


def _targets_of_images(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the boxes and labels that each image has, without the filling."""
    return [
        {"boxes": boxes[labels > 0], "labels": labels[labels > 0]}
        for boxes, labels in zip(batch["boxes"], batch["labels"], strict=True)
    ]


def _pad_to_one_tensor(outputs: Detections, name: str) -> Tensor:
    """Return what the images have by a name as one tensor (images, detections, ...), with zeros for none."""
    try:
        return pad_sequence([image[name] for image in outputs], batch_first=True)
    except (TypeError, KeyError, IndexError, RuntimeError) as error:
        raise ConfigError(
            "the model returned no list of dicts with boxes, labels and scores in evaluation mode; detection needs one"
        ) from error
