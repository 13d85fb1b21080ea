"""A small detector: a map of where the center of an object is, and from there the ways to the sides of its box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ampcompare.tasks.unet import UNet

__all__ = ["CenterNet"]

DETECTIONS = 10  # of an image
RARE = -2.2  # logit of a probability of 0.1, with which every pixel begins
NEAR = 1.5  # pixels from the center, within which the ways to the sides are trained
SPREAD = 1 / 6  # of the map around a center, as a share of the box


class CenterNet(nn.Module):
    """Objects as points on a U-Net's output, with the interface of torchvision's detectors.

    Source: Zhou, Wang and Krähenbühl, arXiv 1904.07850; at the resolution of the image, and with the distances to four
    sides instead of size and offset.

    Args:
        num_classes: with the background, which is 0.
        sample_shape: (channels, height, width).
        width: channels of the U-Net's first stage; depth: its number of stages.
    """

    def __init__(self, num_classes: int, sample_shape: Sequence[int], *, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.num_kinds = num_classes - 1
        self.unit = max(sample_shape[1:]) / 8  # pixels
        self.net = UNet(self.num_kinds + 4, sample_shape, width=width, depth=depth)
        assert self.net.head.bias is not None
        nn.init.constant_(self.net.head.bias[: self.num_kinds], RARE)

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return two losses in training mode, else the detections of each image by falling score.

        Args:
            images: each (channels, height, width).
            targets: of each image, `boxes` (objects, 4) and `labels` (objects,); needed in training mode.

        Returns:
            `center` and `box`, or for each image `boxes` (10, 4), `labels` (10,) and `scores` (10,), in float32.
        """
        maps = self.net(torch.stack(list(images))).float()
        centers, sides = maps[:, : self.num_kinds], F.softplus(maps[:, self.num_kinds :]) * self.unit
        if not self.training:
            return _detections(centers.sigmoid(), sides)
        if targets is None:
            raise ValueError("a detector needs targets in training mode")
        boxes = pad_sequence([target["boxes"].float() for target in targets], batch_first=True)
        labels = pad_sequence([target["labels"] for target in targets], batch_first=True)
        return self._losses(centers, sides, boxes, labels)

    def _losses(self, centers: Tensor, sides: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Compare maps (batch, ..., height, width) with boxes (batch, objects, 4) of labels (batch, objects)."""
        down, right = _pixels(centers)
        middle = (boxes[..., :2] + boxes[..., 2:])[..., None, None] / 2
        size = (boxes[..., 2:] - boxes[..., :2]).clamp(min=1)[..., None, None]
        there = (labels > 0)[..., None, None]
        across, along = right - middle[:, :, 0], down - middle[:, :, 1]  # (batch, objects, height, width)
        hill = torch.exp(-((across / size[:, :, 0]).square() + (along / size[:, :, 1]).square()) / (2 * SPREAD**2))
        top = (across.abs() <= 0.5) & (along.abs() <= 0.5)
        hill = torch.where(top, 1.0, hill) * there
        kinds = torch.arange(1, self.num_kinds + 1, device=labels.device)
        is_kind = (labels[..., None] == kinds)[..., None, None]  # (batch, objects, kinds, 1, 1)
        hills = hill[:, :, None] * is_kind
        truth = hills.amax(1) if hills.shape[1] else torch.zeros_like(centers)
        objects = there.sum().clamp(min=1)

        near = ((across.abs() <= NEAR) & (along.abs() <= NEAR) & there).float()
        left, above, rest, below = boxes[..., None, None].unbind(2)
        ways = torch.stack([right - left, down - above, rest - right, below - down], 2)  # (batch, objects, 4, h, w)
        misses = (sides[:, None] - ways).abs().mean(2) / self.unit
        return {
            "center": _focal(centers, truth).sum() / objects,
            "box": (misses * near).sum() / near.sum().clamp(min=1),
        }


def _focal(logits: Tensor, truth: Tensor) -> Tensor:
    """Return the focal loss of each pixel, less the nearer to a center; source as above, with its exponents 2 and 4."""
    probability = logits.sigmoid()
    hit = (1 - probability).square() * F.logsigmoid(logits)
    miss = (1 - truth) ** 4 * probability.square() * F.logsigmoid(-logits)
    return -torch.where(truth == 1, hit, miss)


def _detections(centers: Tensor, sides: Tensor) -> list[dict[str, Tensor]]:
    """Return the highest peaks of the probabilities (batch, kinds, height, width), with their boxes."""
    height, width = centers.shape[2:]
    peaks = centers * (centers == F.max_pool2d(centers, 3, stride=1, padding=1))
    scores, places = peaks.flatten(1).topk(DETECTIONS)
    pixels = places % (height * width)
    ways = sides.flatten(2).gather(2, pixels[:, None].expand(-1, 4, -1))
    down, right = pixels // width + 0.5, pixels % width + 0.5
    boxes = torch.stack([right - ways[:, 0], down - ways[:, 1], right + ways[:, 2], down + ways[:, 3]], 2)
    labels = places // (height * width) + 1
    names = ("boxes", "labels", "scores")
    return [dict(zip(names, image, strict=True)) for image in zip(boxes, labels, scores, strict=True)]


def _pixels(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the column of the center of each pixel, both (height, width)."""
    rows, columns = (torch.arange(size, device=maps.device) + 0.5 for size in maps.shape[2:])
    down, right = torch.meshgrid(rows, columns, indexing="ij")
    return down, right
