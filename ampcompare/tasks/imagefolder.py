"""Images in folders, laid out as ImageNet usually is: `train/CLASS/*.jpg` and `val/CLASS/*.jpg`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ampcompare.base.errors import ConfigError
from ampcompare.base.files.read import FileFault, open_regular
from ampcompare.tasks.data import spread
from ampcompare.tasks.dataloader import KeyedSamples, StreamData
from ampcompare.tasks.layout import check_layout
from ampcompare.tasks.packages import needs_package
from ampcompare.tasks.torchvision_loader import load_torchvision

__all__ = ["imagefolder"]

_DEFAULT_SIZE = 224
# What ImageNet's usual validation resizes to before it crops 224.
_RESIZE_RATIO = 256 / 224
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_MAX_PIXELS = 64_000_000  # 192 MB as RGB, whatever the size of the file


def imagefolder(
    name: str,
    root: str,
    *,
    seed: int,
    image_size: int | None,
    channels: int | None,
    train_size: int | None,
    val_size: int | None,
    augment: bool,
) -> StreamData:
    """Read color images below `root`, one folder for each class, the same classes in `train` and `val`.

    Training images are random crops, resized and randomly flipped; validation images, and training
    images without `augment`, are resized and cropped at the center. Both are normalized as for ImageNet.

    Raises:
        ConfigError: the layout is another, there are no images, or a number of channels other than 3 was asked for.
        BackendUnavailable: torchvision or Pillow is missing.
    """
    if channels not in (None, 3):
        raise ConfigError(f"{channels} channels were requested, but {name} gives images of 3")
    check_layout(root)
    vision = load_torchvision()
    size = image_size or _DEFAULT_SIZE
    transforms = vision.transforms
    finish = [transforms.ToTensor(), transforms.Normalize(_IMAGENET_MEAN, _IMAGENET_STD)]
    center = [transforms.Resize(round(size * _RESIZE_RATIO)), transforms.CenterCrop(size)]
    random = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    parts = {}
    for part, count in (("train", train_size), ("val", val_size)):
        transform = transforms.Compose([*(random if part == "train" and augment else center), *finish])
        try:
            images = vision.datasets.ImageFolder(str(Path(root) / part), transform=transform, loader=_open)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{Path(root) / part} has folders without images: {' '.join(str(error).split())}"
            ) from error
        chosen = spread(len(images), count, what=f"the {part} folder of {root}", labels=torch.tensor(images.targets))
        parts[part] = KeyedSamples(images, chosen, name=name, purpose=part, seed=seed, num_classes=len(images.classes))
    classes = len(parts["train"].samples.classes)
    return StreamData(
        name,
        num_train=len(parts["train"]),
        num_val=len(parts["val"]),
        num_classes=classes,
        sample_shape=(3, size, size),
        seed=seed,
        train=parts["train"],
        val=parts["val"],
    )


def _open(path: str) -> Any:
    with needs_package("images are read with", "Pillow"):
        from PIL import Image
    try:
        with os.fdopen(open_regular(Path(path)), "rb") as file, Image.open(file) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise FileFault(f"{image.width}x{image.height} pixels are more than the {_MAX_PIXELS:,} that are read")
            return image.convert("RGB")
    except Exception as error:  # Pillow's error for a damaged file depends on the format
        raise ConfigError(
            f"{path} cannot be read as an image ({type(error).__name__}: {error}); repair or remove it"
        ) from error
