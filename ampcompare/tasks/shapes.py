"""Generated images for segmentation and detection: discs, squares and triangles of different brightness in noise."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ampcompare.tasks.data import SampleOptions, seeded_generator
from ampcompare.tasks.in_memory import TensorData

CLASSES = 4  # background, disc, square, triangle
SIZE = 24
TRAIN, VAL = 512, 128
SHAPES = 3  # in an image; a later one covers those before it
RADIUS = (0.15, 0.2)  # least, and how much more the largest have, as shares of the size
NOISE = 0.3
BOXED_SIZE = 32
MIN_PIXELS = 9  # a shape of which less can be seen is not asked for


def make_shape_images(options: SampleOptions) -> TensorData:
    """Generate images, the same ones for every seed: 512 and 128 of 24 pixels and one channel by default.

    Returns:
        Batches of float32 images (batch, channels, size, size) and int64 classes (batch, size, size).
    """
    train, val = ((images, classes) for images, classes, _ in _draw_training_and_validation(options, SIZE))
    return TensorData.of("shapes", train, val, seed=options.seed)


def make_boxed_shape_images(options: SampleOptions) -> TensorData:
    """Generate images with a box around what can be seen of each shape.

    Returns:
        Batches of dicts: `image`, float32 (batch, channels, size, size), 32 pixels by default; `boxes`, float32
        (batch, 3, 4), as left, top, right, bottom in pixels; `labels`, int64 (batch, 3), 0 where there is no box.
    """
    parts = []
    for images, classes, owners in _draw_training_and_validation(options, BOXED_SIZE):
        boxes, labels = zip(
            *(_box_of_shape(owners == number, classes) for number in range(1, SHAPES + 1)), strict=True
        )
        parts.append({"image": images, "boxes": torch.stack(boxes, 1), "labels": torch.stack(labels, 1)})
    return TensorData.of("shapes", *parts, seed=options.seed)


def _box_of_shape(visible_masks: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the box and the class of what is seen (count, size, size) of one shape; zeros where that is too little."""
    there = visible_masks.flatten(1).sum(1) >= MIN_PIXELS
    ends = []
    for axis in (1, 2):  # columns, then rows
        line = visible_masks.any(axis).to(torch.uint8)
        ends.append((line.argmax(1), line.shape[1] - line.flip(1).argmax(1)))
    (left, right), (top, bottom) = ends
    box = torch.stack([left, top, right, bottom], 1) * there[:, None]
    return box.float(), (classes * visible_masks).flatten(1).amax(1) * there


def _draw_training_and_validation(
    options: SampleOptions, size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield of each part images (count, channels, size, size), and of each pixel its class and its shape's number."""
    for part, count in (("training", options.train_size or TRAIN), ("validation", options.val_size or VAL)):
        images, classes, owners = _draw_images_classes_and_shapes(part, count, options.image_size or size)
        yield images.repeat(1, options.channels or 1, 1, 1), classes, owners


def _draw_images_classes_and_shapes(part: str, count: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images (count, 1, size, size), and for each pixel its class and the number of its shape, 0 for none."""
    draws = seeded_generator(f"shapes, {part}", size)
    rows = torch.arange(size, dtype=torch.float32)[:, None] / size
    columns = rows.T
    images = torch.zeros(count, size, size)
    classes = torch.zeros(count, size, size, dtype=torch.int64)
    owners = torch.zeros_like(classes)
    for number in range(1, SHAPES + 1):
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
        owners = torch.where(inside, number, owners)
    noise = torch.randn(count, size, size, generator=draws)
    return (images + NOISE * noise)[:, None].contiguous(), classes, owners
