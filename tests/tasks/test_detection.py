"""Detection: shapes, models, overlap, suppression and average precision, by hand and by loops."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampcompare.base.errors import ConfigError
from ampcompare.settings.recipe import ModelConfig, Recipe
from ampcompare.tasks.boxes import average_precision, box_iou, mask_of_right_detections, nms
from ampcompare.tasks.data import SampleOptions
from ampcompare.tasks.detection import Detection, detection
from ampcompare.tasks.models import build_model
from ampcompare.tasks.networks import CenterNet
from ampcompare.tasks.shapes import CLASSES, make_boxed_shape_images, make_shape_images


def _task(**recipe: Any) -> Detection:
    small = {"task": "detection", "data": {"train_size": 16, "val_size": 8, "image_size": 16}}
    return detection(Recipe.model_validate({**small, **recipe}))


def _values(task: Detection, outputs: list[dict[str, Tensor]], batch: dict[str, Tensor]) -> dict[str, float]:
    sums = {name: part.double().sum(0).numpy() for name, part in task.measure(outputs, batch).items()}
    return task.values(sums, len(outputs))


def _truth(batch: dict[str, Tensor], shift: float = 0.0) -> list[dict[str, Tensor]]:
    """Return what a model returns that finds all objects, each box moved to the right."""
    found = []
    for boxes, labels in zip(batch["boxes"], batch["labels"], strict=True):
        there = labels > 0
        moved = boxes[there] + torch.tensor([shift, 0.0, shift, 0.0])
        found.append({"boxes": moved, "labels": labels[there], "scores": torch.rand(int(there.sum()))})
    return found


def test_boxes_enclose_the_pixels_of_a_class() -> None:
    """The boxes of a class together enclose its pixels of the segmentation of equal images, up to hidden shapes."""
    small = SampleOptions(0, image_size=24, train_size=16, val_size=4)
    boxed = make_boxed_shape_images(small).train
    images, classes = make_shape_images(small).train
    assert torch.equal(boxed["image"], images)
    assert (boxed["labels"].max(1).values > 0).all(), "every image has an object"
    for kind in range(1, CLASSES):
        for boxes, labels, pixels in zip(boxed["boxes"], boxed["labels"], classes == kind, strict=True):
            rows, columns = torch.where(pixels)
            for left, top, right, bottom in boxes[labels == kind]:
                assert (pixels[int(top) : int(bottom), int(left) : int(right)]).any(0).sum() >= 1
                assert rows.min() <= top < bottom <= rows.max() + 1
                assert columns.min() <= left < right <= columns.max() + 1
    assert (boxed["boxes"][boxed["labels"] == 0] == 0).all()


def test_average_precision_of_the_truth_is_one() -> None:
    """All objects found, none found, and boxes moved so far that they fit at an overlap of 0.5 only."""
    task = _task()
    batch = next(task.data.val_batches(8, device="cpu"))
    assert _values(task, _truth(batch), batch) == {"AP50": 1, "AP75": 1}
    nothing = {
        "boxes": torch.zeros(0, 4),
        "labels": torch.zeros(0, dtype=torch.int64),
        "scores": torch.zeros(0),
    }
    assert _values(task, [nothing] * 8, batch) == {"AP50": 0, "AP75": 0}
    moved = _values(task, _truth(batch, shift=1.0), batch)
    assert moved["AP75"] < 0.5 < moved["AP50"]
    wrong = [{**image, "labels": image["labels"] % 3 + 1} for image in _truth(batch)]
    assert _values(task, wrong, batch)["AP50"] < 0.1


def test_images_without_objects_have_a_loss() -> None:
    model = CenterNet(CLASSES, (1, 16, 16), width=4)
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    losses = model(list(torch.randn(2, 1, 16, 16)), [empty, empty])
    total = torch.stack(list(losses.values())).sum()
    total.backward()
    assert math.isfinite(total.item())
    with pytest.raises(ValueError, match="needs targets"):
        model(list(torch.randn(2, 1, 16, 16)))


@pytest.mark.slow
def test_a_detector_of_torchvision_trains_and_finds() -> None:
    """RetinaNet gets images of their own size, has losses, and returns detections; `nms` needs no compiled operator."""
    torch.manual_seed(0)
    # Many scores above the threshold, so that boxes are suppressed.
    arguments = {"score_thresh": 0.0, "detections_per_img": 5, "topk_candidates": 20}
    task = _task(
        model={"arch": "retinanet_resnet50_fpn", "args": arguments},
        data={"train_size": 2, "val_size": 1, "image_size": 32},
    )
    models = task.make_models()
    batch = next(task.data.train_batches(0, 2, device="cpu"))
    assert math.isfinite(task.loss(models, batch).item())
    models[0].eval()
    with torch.no_grad():
        found = task.predict(models, next(task.data.val_batches(1, device="cpu")))
    assert found[0]["boxes"].shape == (5, 4)
    assert found[0]["boxes"].max() <= 32


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("maskrcnn_resnet50_fpn", "trained with masks or key points"),
        ("fcn_resnet50", "not for detection"),
        ("retinanet_resnet50", "did you mean 'retinanet_resnet50_fpn'"),
    ],
)
def test_models_that_cannot_be_trained(arch: str, message: str) -> None:
    """A detector of masks and a model for something else are refused by name."""
    with pytest.raises(ConfigError, match=message):
        build_model(arch, num_classes=CLASSES, sample_shape=(3, 32, 32), kind="detection")


class _Classifier(nn.Module):
    def forward(self, images: list[Tensor], targets: Any = None) -> Tensor:
        return torch.zeros(len(images), 4)


def test_a_model_that_is_no_detector() -> None:
    """A model that returns a tensor is named, in training and in evaluation."""
    data = make_boxed_shape_images(SampleOptions(0, image_size=16, train_size=4, val_size=2))
    task = Detection(data, CLASSES, ModelConfig(arch="centernet"))
    batch = next(data.val_batches(2, device="cpu"))
    with pytest.raises(ConfigError, match="a Tensor in training mode; detection needs a dict of losses"):
        task.loss([_Classifier()], batch)
    with pytest.raises(ConfigError, match="no list of dicts with boxes, labels and scores"):
        task.measure(_Classifier()(list(batch["image"])), batch)  # type: ignore[arg-type]


def _random_boxes(count: int, draws: torch.Generator) -> Tensor:
    corner = 10 * torch.rand(count, 2, generator=draws)
    return torch.cat([corner, corner + 0.5 + 5 * torch.rand(count, 2, generator=draws)], 1)


def test_overlap() -> None:
    """Intersection over union of boxes that are equal, share a quarter, touch, and have no area."""
    box = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
    others = torch.tensor([[0.0, 0, 2, 2], [1, 1, 3, 3], [2, 0, 4, 2], [0, 0, 0, 0]])
    assert box_iou(box, others).tolist() == [pytest.approx([1, 1 / 7, 0, 0])]
    assert box_iou(others[3:], others[3:]).tolist() == [[0]]


@pytest.mark.parametrize("seed", range(2))
def test_suppression_is_greedy(seed: int) -> None:
    """A loop over single boxes keeps the same ones."""
    draws = torch.Generator().manual_seed(seed)
    boxes, scores = _random_boxes(40, draws), torch.rand(40, generator=draws)
    kept: list[int] = []
    for place in sorted(range(40), key=lambda number: -scores[number].item()):
        if all(box_iou(boxes[place, None], boxes[other, None]).item() <= 0.3 for other in kept):
            kept.append(place)
    assert nms(boxes, scores, 0.3).tolist() == kept
    assert 1 < len(kept) < 40


def test_an_object_is_found_once() -> None:
    """A second box on an object, one of another class and one that fits badly are wrong; filling is never right."""
    truth = torch.tensor([[[0.0, 0, 4, 4], [10, 10, 14, 14], [0, 0, 0, 0]]])
    boxes = torch.tensor([[[0.0, 0, 4, 4], [0, 0, 4, 4], [10, 10, 14, 14], [10, 10, 14, 13], [0, 0, 0, 0]]])
    labels = torch.tensor([[1, 1, 2, 1, 0]])
    assert mask_of_right_detections(boxes, labels, truth, torch.tensor([[1, 1, 0]]), iou=0.5).tolist() == [
        [True, False, False, True, False]
    ]
    assert mask_of_right_detections(boxes, labels, truth, torch.tensor([[1, 1, 0]]), iou=0.8).tolist() == [
        [True, False, False, False, False]
    ]


def test_average_precision_by_hand() -> None:
    """Right, wrong, right, with three objects: 1/3 at precision 1 and 1/3 at 2/3."""
    right, found = np.array([1.0, 0.0, 0.0, 1.0]), np.array([1.0, 1.0, 0.0, 1.0])
    assert average_precision(right, found, 3) == pytest.approx(1 / 3 + 2 / 9)
    assert average_precision(np.zeros(4), np.zeros(4), 3) == 0
    assert average_precision(found, found, 3) == 1
