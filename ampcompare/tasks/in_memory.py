"""Data sets small enough to be kept on the device as two tensors: a batch is one gather, without loader or workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError
from ampcompare.tasks.data import LabeledData, Part, spread
from ampcompare.tasks.randomness import generator

__all__ = ["MemoryData", "memory_data", "resize_images", "shift_images"]


@dataclass
class _Epoch:
    """The last epoch that was prepared on a device."""

    number: int
    images: Tensor


@dataclass(frozen=True, eq=False)
class MemoryData(LabeledData):
    """Images in memory; in each epoch a random `moved_share` of those for training is shifted by up to one pixel.

    Pixels that a shift uncovers are set to `background`.

    `workers` and `pin_memory` are ignored: the images are on the device.
    """

    on_device = True
    moved_share: float
    background: float
    train: tuple[Tensor, Tensor] = field(repr=False)
    val: tuple[Tensor, Tensor] = field(repr=False)
    _moved: dict[torch.device, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = field(
        default_factory=dict, repr=False
    )
    _epochs: dict[torch.device, _Epoch] = field(default_factory=dict, repr=False)

    def _read(
        self,
        part: Part,
        epoch: int,
        batches: Sequence[Tensor],
        device: torch.device,
        workers: int,
        pin_memory: bool | None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        train, (images, labels) = self._on(device)
        if part == "train":
            images, labels = self._shifted(epoch, device), train[1]
        return _gather(images, labels, batches)

    def _on(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        if device not in self._moved:
            train, val = self.train, self.val
            self._moved[device] = (train[0].to(device), train[1].to(device)), (val[0].to(device), val[1].to(device))
        return self._moved[device]

    def _shifted(self, epoch: int, device: torch.device) -> Tensor:
        """Return the images of an epoch; those of the last one are kept."""
        last = self._epochs.get(device)
        if last is None or last.number != epoch:
            images = self._on(device)[0][0]
            if self.moved_share:
                draws = generator("shift", self.seed, epoch)
                shifts = torch.randint(-1, 2, (self.num_train, 2), generator=draws)
                shifts[torch.rand(self.num_train, generator=draws) >= self.moved_share] = 0
                images = shift_images(images, shifts, self.background)
            last = _Epoch(epoch, images)
            self._epochs[device] = last
        return last.images


def memory_data(
    name: str,
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    *,
    num_classes: int,
    seed: int,
    image_size: int | None,
    channels: int | None,
    train_size: int | None,
    val_size: int | None,
    moved_share: float,
    background: float,
) -> MemoryData:
    """Choose samples, resize images, repeat their channels, and build a data set.

    Args:
        train: float32 images (N, C, H, W) and int64 labels (N,); `val` likewise.
        image_size: height and width wanted; None leaves them.
        channels: wanted; gray images can be repeated to any number.
        moved_share: share of the training images that an epoch shifts by up to one pixel.
        background: value of an empty pixel.

    Raises:
        ConfigError: too few samples, or a number of channels that is not possible.
    """
    parts = []
    for (images, labels), size, word in ((train, train_size, "training"), (val, val_size, "validation")):
        chosen = spread(len(labels), size, what=f"the {word} part of {name}", labels=labels)
        images, labels = images[chosen], labels[chosen]
        if image_size is not None:
            images = resize_images(images, image_size)
        parts.append((_repeat_channels(images, channels, name).contiguous(), labels))
    chosen_train, chosen_val = parts
    return MemoryData(
        name,
        num_train=len(chosen_train[1]),
        num_val=len(chosen_val[1]),
        num_classes=num_classes,
        sample_shape=tuple(chosen_train[0].shape[1:]),
        seed=seed,
        moved_share=moved_share,
        background=background,
        train=chosen_train,
        val=chosen_val,
    )


def resize_images(images: Tensor, size: int) -> Tensor:
    """Scale images (N, C, H, W) bilinearly to (N, C, size, size), smoothing where they shrink."""
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False, antialias=True)


def shift_images(images: Tensor, shifts: Tensor, fill: float = 0.0) -> Tensor:
    """Move each image by its own whole number of pixels.

    Args:
        images: (N, C, H, W).
        shifts: (N, 2) int64, rows down and columns right.
        fill: value of the pixels that come in from outside.
    """
    count, channels, height, width = images.shape
    margin = int(shifts.abs().max()) if count else 0
    shifts = shifts.to(images.device)
    padded = F.pad(images, (margin, margin, margin, margin), value=fill)
    rows = torch.arange(height, device=images.device) + margin - shifts[:, :1]
    columns = torch.arange(width, device=images.device) + margin - shifts[:, 1:]
    samples = torch.arange(count, device=images.device)[:, None, None, None]
    planes = torch.arange(channels, device=images.device)[:, None, None]
    return padded[samples, planes, rows[:, None, :, None], columns[:, None, None, :]]


def _repeat_channels(images: Tensor, channels: int | None, name: str) -> Tensor:
    if channels is None or channels == images.shape[1]:
        return images
    if images.shape[1] != 1:
        raise ConfigError(
            f"{channels} channels were requested, but {name} has {images.shape[1]}; only gray images can be repeated"
        )
    return images.expand(-1, channels, -1, -1)


def _gather(images: Tensor, labels: Tensor, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in batches:
        yield images.index_select(0, batch), labels.index_select(0, batch)
