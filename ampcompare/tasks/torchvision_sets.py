"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100, from torchvision."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError, EnvironmentUnfit
from ampcompare.tasks.catalog import DEFAULT_DATA_DIR, TORCHVISION_FILES, missing_files, require_files
from ampcompare.tasks.data import spread
from ampcompare.tasks.dataloader import KeyedSamples, StreamData
from ampcompare.tasks.in_memory import resize_images
from ampcompare.tasks.torchvision_loader import load_torchvision

__all__ = ["SmallImages", "downloaded"]

_NETWORK_TIMEOUT_SECONDS = 15.0


@dataclass(frozen=True)
class _Kind:
    """The name of a set in torchvision, its normalization and its augmentation."""

    dataset: str
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    margin: int
    flip: bool


_KINDS = {
    "mnist": _Kind("MNIST", 10, (0.1307,), (0.3081,), margin=2, flip=False),
    "fashion-mnist": _Kind("FashionMNIST", 10, (0.2860,), (0.3530,), margin=2, flip=True),
    "cifar10": _Kind("CIFAR10", 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), margin=4, flip=True),
    "cifar100": _Kind("CIFAR100", 100, (0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762), margin=4, flip=True),
}


class SmallImages(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images held as bytes, each cropped, flipped, normalized and resized when it is read.

    Args:
        images: uint8 (N, C, H, W).
        labels: int64 (N,).
        kind: normalization and augmentation.
        image_size: height and width to give; None keeps them.
        augment: crop out of an image widened by black margins, and flip, at random from torch's global generator.
    """

    def __init__(self, images: Tensor, labels: Tensor, kind: _Kind, *, image_size: int | None, augment: bool) -> None:
        self.images = images
        self.labels = labels
        self.margin = kind.margin if augment else 0
        self.flip = kind.flip and augment
        self.mean = 255 * torch.tensor(kind.mean)[:, None, None]
        self.std = 255 * torch.tensor(kind.std)[:, None, None]
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.margin:
            height, width = image.shape[1:]
            top, left = torch.randint(0, 2 * self.margin + 1, (2,)).tolist()
            padded = F.pad(image, (self.margin,) * 4)
            image = padded[:, top : top + height, left : left + width]
        if self.flip and int(torch.randint(0, 2, ())):
            image = image.flip(2)
        values = image.to(torch.float32).sub_(self.mean).div_(self.std)
        if self.image_size is not None:
            values = resize_images(values[None], self.image_size)[0]
        return values, int(self.labels[index])


def downloaded(
    name: str,
    *,
    seed: int,
    data_dir: str | None,
    download: bool,
    image_size: int | None,
    channels: int | None,
    train_size: int | None,
    val_size: int | None,
    augment: bool,
) -> StreamData:
    """Load one of torchvision's small sets from `data_dir`, downloading it first if `download` is set.

    Raises:
        ConfigError: missing or damaged files, too few samples, or a number of channels that is not possible.
        EnvironmentUnfit: the download failed; BackendUnavailable: no torchvision.
    """
    kind = _KINDS[name]
    folder = Path(data_dir or DEFAULT_DATA_DIR)
    if channels is not None and len(kind.mean) not in (1, channels):
        raise ConfigError(
            f"{channels} channels were requested, but {name} has {len(kind.mean)}; only gray images can be repeated"
        )
    dataset = getattr(load_torchvision().datasets, kind.dataset)
    if download and missing_files(name, folder):
        _fetch(name, dataset, folder)
    require_files(name, folder)
    parts = {}
    for part, size in (("train", train_size), ("val", val_size)):
        images, labels = _read(name, dataset, folder, train=part == "train")
        chosen = spread(len(labels), size, what=f"the {part} part of {name}", labels=labels)
        samples = SmallImages(images, labels, kind, image_size=image_size, augment=augment and part == "train")
        parts[part] = KeyedSamples(
            samples, chosen, name=name, purpose=part, seed=seed, num_classes=kind.num_classes, channels=channels
        )
    height, width = (image_size, image_size) if image_size is not None else images.shape[2:]
    shape = (channels or len(kind.mean), height, width)
    return StreamData(
        name,
        num_train=len(parts["train"]),
        num_val=len(parts["val"]),
        num_classes=kind.num_classes,
        sample_shape=shape,
        seed=seed,
        train=parts["train"],
        val=parts["val"],
    )


def _read(name: str, dataset: Any, folder: Path, *, train: bool) -> tuple[Tensor, Tensor]:
    """Return uint8 images (N, C, H, W) and int64 labels (N,)."""
    try:
        samples = dataset(str(folder), train=train)
    except Exception as error:  # damaged files raise many kinds of errors
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{name} in {folder / TORCHVISION_FILES[name][0]} cannot be read ({type(error).__name__}: {text}); "
            "delete that folder and pass --download"
        ) from error
    images = torch.as_tensor(samples.data)
    images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return images.contiguous(), torch.as_tensor(samples.targets, dtype=torch.int64)


def _fetch(name: str, dataset: Any, folder: Path) -> None:
    """Download a set below `folder`; other processes that need it wait for the first.

    Raises:
        EnvironmentUnfit: the network or the folder does not allow it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder / f".{name}.lock")), _network_timeout(), contextlib.redirect_stdout(sys.stderr):
            if missing_files(name, folder):
                dataset(str(folder), train=True, download=True)
    except (OSError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise EnvironmentUnfit(
            f"{name} could not be downloaded to {folder} ({type(error).__name__}: {text}); "
            f"copy it to {folder / TORCHVISION_FILES[name][0]} from a machine with network access, or use --data digits"
        ) from error


@contextlib.contextmanager
def _network_timeout() -> Iterator[None]:
    """Let connections without an answer fail; torchvision sets no timeout."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_NETWORK_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
