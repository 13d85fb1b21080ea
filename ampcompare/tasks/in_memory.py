"""Data sets small enough to be kept on the device as tensors: a batch is one gather, without loader or workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError
from ampcompare.base.tensors.tree import map_tensors_in_tree, tensors_in_value
from ampcompare.tasks.data import (
    Data,
    LabeledData,
    Part,
    SampleOptions,
    choose_indices_evenly,
    seeded_generator,
)


@dataclass(frozen=True, eq=False)
class TensorData(Data):
    """Samples as tensors in tuples and dicts, whose first dimension counts the samples; batches have their structure.

    `workers` and `pin_memory` are ignored: the tensors are on the device.
    """

    on_device = True
    train: Any = field(repr=False)
    val: Any = field(repr=False)
    _moved: dict[torch.device, tuple[Any, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, name: str, train: Any, val: Any, *, seed: int) -> TensorData:
        counts = [
            _count_samples(name, part, value) for part, value in (("training", train), ("validation", val))
        ]
        return cls(name, num_train=counts[0], num_val=counts[1], seed=seed, train=train, val=val)

    def _read_batches(
        self,
        part: Part,
        epoch: int,
        batches: Sequence[Tensor],
        device: torch.device,
        workers: int,
        pin_memory: bool | None,
    ) -> Iterator[Any]:
        return _gather_batches(
            self._training_samples_of_epoch(epoch, device)
            if part == "train"
            else self._parts_on_device(device)[1],
            batches,
        )

    def _training_samples_of_epoch(self, epoch: int, device: torch.device) -> Any:
        return self._parts_on_device(device)[0]

    def _parts_on_device(self, device: torch.device) -> tuple[Any, Any]:
        if device not in self._moved:
            parts = [
                map_tensors_in_tree(part, lambda tensor: tensor.to(device)) for part in (self.train, self.val)
            ]
            self._moved[device] = parts[0], parts[1]
        return self._moved[device]


def _count_samples(name: str, part: str, samples: Any) -> int:
    counts = {len(tensor) if tensor.dim() else 0 for tensor in tensors_in_value(samples)}
    if len(counts) != 1 or 0 in counts:
        raise ConfigError(
            f"the {part} part of {name} has tensors of {', '.join(map(str, sorted(counts))) or 'no'} samples; "
            "each tensor needs the same number of them, at least 1"
        )
    return counts.pop()


def _gather_batches(samples: Any, batches: Sequence[Tensor]) -> Iterator[Any]:
    for batch in batches:
        yield map_tensors_in_tree(samples, lambda tensor, batch=batch: tensor.index_select(0, batch))  # type: ignore[misc]


@dataclass(frozen=True, eq=False, kw_only=True)
class InMemoryImages(TensorData, LabeledData):
    """Images in memory; in each epoch a random `moved_share` of those for training is shifted by up to one pixel.

    Pixels that a shift uncovers are set to `background`.
    """

    moved_share: float
    background: float
    _epochs: dict[torch.device, tuple[int, Tensor]] = field(default_factory=dict, repr=False)

    def _training_samples_of_epoch(self, epoch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the samples of an epoch, whose images are kept until the next one."""
        images, labels = self._parts_on_device(device)[0]
        number, shifted = self._epochs.get(device, (None, images))
        if number != epoch:
            if self.moved_share:
                draws = seeded_generator("shift", self.seed, epoch)
                shifts = torch.randint(-1, 2, (self.num_train, 2), generator=draws)
                shifts[torch.rand(self.num_train, generator=draws) >= self.moved_share] = 0
                images = shift_images(images, shifts, self.background)
            shifted = images
            self._epochs[device] = epoch, shifted
        return shifted, labels


def make_memory_data(
    name: str,
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    options: SampleOptions,
    *,
    num_classes: int,
    moved_share: float,
    background: float,
) -> InMemoryImages:
    """Choose samples, resize images, repeat their channels, and build a data set.

    Each part is float32 images (N, C, H, W) and int64 labels (N,).
    """
    parts = []
    for (images, labels), (part, size) in zip((train, val), options.sizes_by_part.items(), strict=True):
        chosen = choose_indices_evenly(len(labels), size, what=f"the {part} part of {name}", labels=labels)
        images, labels = images[chosen], labels[chosen]
        if options.image_size is not None:
            images = resize_images(images, options.image_size)
        parts.append((_repeat_gray_channel(images, options.channels, name).contiguous(), labels))
    chosen_train, chosen_val = parts
    return InMemoryImages(
        name,
        num_train=len(chosen_train[1]),
        num_val=len(chosen_val[1]),
        num_classes=num_classes,
        sample_shape=tuple(chosen_train[0].shape[1:]),
        seed=options.seed,
        moved_share=moved_share if options.augment else 0.0,
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
    """Move each image (N, C, H, W) by its own whole pixels, int64 (N, 2): rows down and columns right."""
    count, channels, height, width = images.shape
    margin = int(shifts.abs().max()) if count else 0
    shifts = shifts.to(images.device)
    padded = F.pad(images, (margin, margin, margin, margin), value=fill)
    rows = torch.arange(height, device=images.device) + margin - shifts[:, :1]
    columns = torch.arange(width, device=images.device) + margin - shifts[:, 1:]
    samples = torch.arange(count, device=images.device)[:, None, None, None]
    planes = torch.arange(channels, device=images.device)[:, None, None]
    return padded[samples, planes, rows[:, None, :, None], columns[:, None, None, :]]


def _repeat_gray_channel(images: Tensor, channels: int | None, name: str) -> Tensor:
    if channels is None or channels == images.shape[1]:
        return images
    if images.shape[1] != 1:
        raise ConfigError(
            f"{channels} channels were requested, but {name} has {images.shape[1]}; only gray images can be repeated"
        )
    return images.expand(-1, channels, -1, -1)
