"""Boxes in images: overlap, suppression of near copies, which detections are right, and average precision."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def box_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Return intersection over union of boxes (..., n, 4) with others (..., m, 4): (..., n, m), 0 without an area."""
    ours, theirs = boxes[..., :, None, :], others[..., None, :, :]
    shared = torch.minimum(ours[..., 2:], theirs[..., 2:]) - torch.maximum(ours[..., :2], theirs[..., :2])
    both = shared.clamp(min=0).prod(-1)
    union = _area_of_boxes(ours) + _area_of_boxes(theirs) - both
    return torch.where(union > 0, both / union, 0.0)


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Non-maximum suppression: keep a box (n, 4) unless one with a higher score that is kept overlaps it by more.

    Returns:
        Indices of the boxes that are kept, int64, by falling score.
    """
    order = scores.argsort(dim=0, descending=True, stable=True)
    ordered = boxes[order]
    overlap = (box_iou(ordered, ordered) > iou_threshold).cpu()
    kept = torch.ones(len(order), dtype=torch.bool)
    for place in range(len(order)):
        if kept[place]:
            kept[place + 1 :] &= ~overlap[place, place + 1 :]
    return order[kept.to(order.device)]


def mask_of_right_detections(
    boxes: Tensor, labels: Tensor, true_boxes: Tensor, true_labels: Tensor, *, iou: float
) -> Tensor:
    """Return which detections are right: by falling score, each takes the free object of its class that it fits best.

    Args:
        boxes, labels: of detections, (images, detections, 4) and (images, detections); 0 where there is none.
        true_boxes, true_labels: of objects, (images, objects, 4) and (images, objects).
        iou: the least overlap of a right detection.

    Returns:
        bool (images, detections).
    """
    same = (labels[:, :, None] == true_labels[:, None, :]) & (labels[:, :, None] > 0)
    overlap = torch.where(same, box_iou(boxes, true_boxes), -1.0)
    right = torch.zeros_like(labels, dtype=torch.bool)
    for place in range(labels.shape[1]):
        best, chosen = overlap[:, place].max(1)
        right[:, place] = best >= iou
        taken = torch.nn.functional.one_hot(chosen, overlap.shape[2]).bool() & right[:, place, None]
        overlap = overlap.masked_fill(taken[:, None, :], -1.0)
    return right


def average_precision(right: NDArray[np.float64], found: NDArray[np.float64], objects: float) -> float:
    """Return the area under the curve of precision over recall, where precision is the best at that recall or above.

    `right` and all `found` detections are counted in intervals of scores, lowest first.
    """
    hits, all_found = (np.cumsum(part[::-1]) for part in (right, found))
    precision = np.divide(hits, all_found, out=np.zeros_like(hits), where=all_found > 0)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float((np.diff(hits, prepend=0.0) / objects * envelope).sum())


def _area_of_boxes(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)
