"""Overlap, suppression, right detections and average precision, against counts by hand and by loops."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ampcompare.tasks.boxes import average_precision, box_iou, nms, right_detections


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
    assert right_detections(boxes, labels, truth, torch.tensor([[1, 1, 0]]), iou=0.5).tolist() == [
        [True, False, False, True, False]
    ]
    assert right_detections(boxes, labels, truth, torch.tensor([[1, 1, 0]]), iou=0.8).tolist() == [
        [True, False, False, False, False]
    ]


def test_average_precision_by_hand() -> None:
    """Right, wrong, right, with three objects: 1/3 at precision 1 and 1/3 at 2/3."""
    right, found = np.array([1.0, 0.0, 0.0, 1.0]), np.array([1.0, 1.0, 0.0, 1.0])
    assert average_precision(right, found, 3) == pytest.approx(1 / 3 + 2 / 9)
    assert average_precision(np.zeros(4), np.zeros(4), 3) == 0
    assert average_precision(found, found, 3) == 1
