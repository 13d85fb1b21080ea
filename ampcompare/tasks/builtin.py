"""The two data sets that need no files and no network: `digits` and `synthetic`."""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompare.tasks.in_memory import MemoryData, memory_data, resize_images
from ampcompare.tasks.packages import needs_package
from ampcompare.tasks.randomness import generator

__all__ = ["digits", "synthetic"]

_DIGITS_HOLDOUT = 5
_DIGITS_MEAN = 4.88  # of pixel values from 0 to 16
_DIGITS_STD = 6.02
_DIGITS_MOVED_SHARE = 0.1
_SYNTHETIC_CLASSES = 10
_SYNTHETIC_SIZE = 32
_SYNTHETIC_TRAIN = 2048
_SYNTHETIC_VAL = 512
_SYNTHETIC_CONTRAST = 0.5


def digits(
    *,
    seed: int,
    image_size: int | None = None,
    channels: int | None = None,
    train_size: int | None = None,
    val_size: int | None = None,
    augment: bool = True,
) -> MemoryData:
    """Load scikit-learn's digits: 1,437 for training, 360 for validation, of mean 0 and standard deviation 1.

    Every fifth digit of each class is for validation, whatever the seed. Augmentation shifts one in ten images by up
    to one pixel: the digits fill their frame, and shifting all of them cuts off so much that accuracy stays below 97 %.

    Raises:
        BackendUnavailable: scikit-learn is not installed.
    """
    with needs_package("digits need", "scikit-learn"):
        from sklearn.datasets import load_digits
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32)[:, None]
    images = (images - _DIGITS_MEAN) / _DIGITS_STD
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    held_out[torch.argsort(labels, stable=True)[::_DIGITS_HOLDOUT]] = True
    return memory_data(
        "digits",
        (images[~held_out], labels[~held_out]),
        (images[held_out], labels[held_out]),
        num_classes=10,
        seed=seed,
        image_size=image_size,
        channels=channels,
        train_size=train_size,
        val_size=val_size,
        moved_share=_DIGITS_MOVED_SHARE if augment else 0.0,
        background=-_DIGITS_MEAN / _DIGITS_STD,
    )


def synthetic(
    *,
    seed: int,
    image_size: int | None = None,
    channels: int | None = None,
    train_size: int | None = None,
    val_size: int | None = None,
    augment: bool = True,
) -> MemoryData:
    """Generate noisy images of ten smooth patterns, the same ones for every seed.

    Args:
        seed: of order and augmentation.
        image_size: height and width, 32 by default.
        channels: 3 by default.
        train_size: number of training images, 2048 by default; `val_size`: 512 by default.
        augment: shift training images by up to one pixel.
    """
    size = image_size or _SYNTHETIC_SIZE
    planes = channels or 3
    draws = generator("synthetic patterns", planes)
    patterns = resize_images(torch.randn(_SYNTHETIC_CLASSES, planes, 4, 4, generator=draws), size)
    return memory_data(
        "synthetic",
        _noisy(patterns, "training", train_size or _SYNTHETIC_TRAIN),
        _noisy(patterns, "validation", val_size or _SYNTHETIC_VAL),
        num_classes=_SYNTHETIC_CLASSES,
        seed=seed,
        image_size=None,
        channels=None,
        train_size=None,
        val_size=None,
        moved_share=1.0 if augment else 0.0,
        background=0.0,
    )


def _noisy(patterns: Tensor, part: str, count: int) -> tuple[Tensor, Tensor]:
    """Return `count` images of the patterns, classes in turn, with unit noise; float32 and int64."""
    labels = torch.arange(count) % len(patterns)
    noise = torch.randn(count, *patterns.shape[1:], generator=generator(f"synthetic {part}", *patterns.shape[1:]))
    return noise.add_(patterns[labels], alpha=_SYNTHETIC_CONTRAST), labels
