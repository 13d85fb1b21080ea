"""Generated images for segmentation: discs, squares and triangles of different brightness in noise."""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompare.tasks.randomness import generator
from ampcompare.tasks.tensor_data import TensorData

__all__ = ["CLASSES", "shapes"]

CLASSES = 4  # background, disc, square, triangle
SIZE = 24
TRAIN, VAL = 512, 128
SHAPES = 3  # in an image; a later one covers those before it
RADIUS = (0.15, 0.2)  # least, and how much more the largest have, as shares of the size
NOISE = 0.3


def shapes(
    *,
    seed: int,
    image_size: int | None = None,
    channels: int | None = None,
    train_size: int | None = None,
    val_size: int | None = None,
) -> TensorData:
    """Generate images, the same ones for every seed.

    Args:
        seed: of the order of each epoch.
        image_size: height and width, 24 by default.
        channels: into which the gray value is repeated, 1 by default.
        train_size: number of training images, 512 by default; `val_size`: 128 by default.

    Returns:
        Batches of float32 images (batch, channels, size, size) and int64 classes (batch, size, size).
    """
    size = image_size or SIZE
    parts = [
        _draw(part, count, size) for part, count in (("training", train_size or TRAIN), ("validation", val_size or VAL))
    ]
    train, val = ((images.repeat(1, channels or 1, 1, 1), classes) for images, classes in parts)
    return TensorData.of("shapes", train, val, seed=seed)


def _draw(part: str, count: int, size: int) -> tuple[Tensor, Tensor]:
    draws = generator(f"shapes, {part}", size)
    rows = torch.arange(size, dtype=torch.float32)[:, None] / size
    columns = rows.T
    images = torch.zeros(count, size, size)
    classes = torch.zeros(count, size, size, dtype=torch.int64)
    for _ in range(SHAPES):
        row, column = torch.rand(2, count, 1, 1, generator=draws)
        radius = RADIUS[0] + RADIUS[1] * torch.rand(count, 1, 1, generator=draws)
        kind = torch.randint(1, CLASSES, (count, 1, 1), generator=draws)
        bright = 0.7 + 0.6 * torch.rand(count, 1, 1, generator=draws)
        down, right = (rows - row) / radius, (columns - column) / radius
        disc = down.square() + right.square() < 1
        square = (down.abs() < 0.85) & (right.abs() < 0.85)
        triangle = (down.abs() < 1) & (right.abs() < (down + 1) / 2)
        inside = torch.where(kind == 1, disc, torch.where(kind == 2, square, triangle))
        images = torch.where(inside, bright, images)
        classes = torch.where(inside, kind, classes)
    noise = torch.randn(count, size, size, generator=draws)
    return (images + NOISE * noise)[:, None].contiguous(), classes
