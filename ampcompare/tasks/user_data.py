"""User data sets, from `package.module:factory`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampcompare.base.errors import ConfigError
from ampcompare.tasks.data import LabeledData, spread
from ampcompare.tasks.dataloader import KeyedSamples, StreamData
from ampcompare.tasks.factory import blamed, named_by, resolve_factory
from ampcompare.tasks.randomness import derive, isolated_globals, seed_globals

__all__ = ["user_data"]

_WANTED = (
    "it must return (train, val) or (train, val, num_classes), two data sets with lengths whose items are (tensor, int)"
)


def user_data(
    path: str,
    *,
    seed: int,
    data_dir: str | None,
    download: bool,
    image_size: int | None,
    channels: int | None,
    train_size: int | None,
    val_size: int | None,
    augment: bool,
) -> LabeledData:
    """Call the user's factory and build a data set from what it returns.

    It is called with those of `seed`, `data_dir`, `download`, `image_size`, `channels`, `train_size`, `val_size` and
    `augment` that it names as parameters. Global generators are seeded with a constant while it runs, so a random split
    inside it is the same for every seed and arm, and are restored afterwards.

    Raises:
        ConfigError: the factory raised, returned something else, or an option was given that it does not take.
    """
    factory = resolve_factory(path)
    sizes = {"train_size": train_size, "val_size": val_size}
    options = {"image_size": image_size, "channels": channels, **sizes}
    offered = {"seed": seed, "data_dir": data_dir, "download": download, "augment": augment, **options}
    taken = named_by(factory, offered)
    if image_size is not None and "image_size" not in taken:
        raise ConfigError(
            f"factory {path} has no parameter image_size, and {image_size} was requested; add it, or drop --image-size"
        )
    with isolated_globals():
        seed_globals(derive("user's factory"))
        with blamed(path, "calling it"):
            result = factory(**taken)
        if isinstance(result, LabeledData):
            for name, size in sizes.items():
                if size is not None and name not in taken:
                    raise ConfigError(
                        f"factory {path} returns a LabeledData and has no parameter {name}, and {size} "
                        "was asked for; add it"
                    )
            return result
        train, val, num_classes = _unpack(path, result)
        _, sample = _checked(path, "train", train), _checked(path, "val", val)
        if channels is not None and sample.shape[0] not in (1, channels):
            raise ConfigError(
                f"factory {path} gives samples of shape {tuple(sample.shape)}, and the model takes {channels}; "
                "return samples that fit, or choose another model"
            )
        classes = _count_classes(path, train) if num_classes is None else num_classes
    parts = {}
    for part, samples, name in (("train", train, "train_size"), ("val", val, "val_size")):
        size = None if name in taken else sizes[name]
        positions = spread(len(samples), size, what=f"the {part} data set of factory {path}")
        parts[part] = KeyedSamples(
            samples, positions, name=path, purpose=part, seed=seed, num_classes=classes, channels=channels
        )
    shape = tuple(sample.shape) if channels is None or sample.shape[0] != 1 else (channels, *sample.shape[1:])
    return StreamData(
        path,
        num_train=len(parts["train"]),
        num_val=len(parts["val"]),
        num_classes=classes,
        sample_shape=shape,
        seed=seed,
        train=parts["train"],
        val=parts["val"],
    )


def _unpack(path: str, result: Any) -> tuple[Any, Any, int | None]:
    if not isinstance(result, (tuple, list)) or len(result) not in (2, 3):
        seen = (
            f"{type(result).__name__} of {len(result)}" if isinstance(result, (tuple, list)) else type(result).__name__
        )
        raise ConfigError(f"factory {path} returned a {seen}; {_WANTED}")
    train, val = result[:2]
    for part, samples in (("train", train), ("val", val)):
        if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
            raise ConfigError(f"factory {path} returned as {part} a {type(samples).__name__}; {_WANTED}")
        if len(samples) == 0:
            raise ConfigError(f"factory {path} returned a {part} data set without samples")
    if len(result) == 2:
        return train, val, None
    if not isinstance(result[2], int) or result[2] < 1:
        raise ConfigError(f"factory {path} returned as num_classes {result[2]!r}; it must be a whole number from 1 on")
    return train, val, result[2]


def _checked(path: str, part: str, samples: Any) -> Tensor:
    """Return the first sample after checking what the data set gives."""
    with blamed(path, f"reading the first item of {part}"):
        item = samples[0]
    if not isinstance(item, (tuple, list)) or len(item) != 2 or not isinstance(item[0], Tensor):
        kinds = (
            ", ".join(type(value).__name__ for value in item)
            if isinstance(item, (tuple, list))
            else type(item).__name__
        )
        raise ConfigError(f"factory {path}: an item of {part} is ({kinds}); {_WANTED}")
    if item[0].ndim == 0:
        raise ConfigError(f"factory {path}: an item of {part} has a tensor without dimensions; {_WANTED}")
    return item[0]


def _count_classes(path: str, samples: Any) -> int:
    """Return 1 + the largest label, after `classes` or `targets` if the data set has them, else by reading it once."""
    classes = getattr(samples, "classes", None)
    if isinstance(classes, (list, tuple)):
        return len(classes)
    with blamed(path, "reading the labels of train"):
        targets = getattr(samples, "targets", None)
        labels = [samples[i][1] for i in range(len(samples))] if targets is None else targets
        return int(torch.as_tensor(labels).max()) + 1
