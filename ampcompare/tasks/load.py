"""From the name of a data set to its batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ampcompare.base.errors import ConfigError, did_you_mean
from ampcompare.tasks.builtin import digits, synthetic
from ampcompare.tasks.catalog import DATA_SETS, TORCHVISION_FILES
from ampcompare.tasks.data import LabeledData
from ampcompare.tasks.imagefolder import imagefolder
from ampcompare.tasks.torchvision_sets import downloaded
from ampcompare.tasks.user_data import user_data

__all__ = ["load_data"]


def load_data(
    name: str,
    *,
    seed: int,
    data_dir: str | None = None,
    download: bool = False,
    image_size: int | None = None,
    channels: int | None = None,
    train_size: int | None = None,
    val_size: int | None = None,
    augment: bool = True,
) -> LabeledData:
    """Load the data set called `name`; a subset, resized images or repeated gray channels if asked for.

    Args:
        name: one of `list_data`, `imagefolder:PATH`, or `package.module:factory`.
        seed: orders and augmentation follow from it; the choice of samples does not.
        data_dir: folder of torchvision's sets; None is the folder `data`. For `imagefolder` without a path, the images.
        download: fetch such a set if it is not there.
        image_size: height and width in pixels; None takes the set's own, 224 for folders of images.
        channels: what the model needs; None takes the set's own.
        train_size: use this many training samples, spread evenly over the classes; `val_size` likewise.
        augment: shift, crop and flip training images at random, as each set defines it.

    Raises:
        ConfigError: unknown name, missing files, or options that the set does not support.
        EnvironmentUnfit: a download failed, or a package is missing.
    """
    for option, value in (
        ("image_size", image_size),
        ("channels", channels),
        ("train_size", train_size),
        ("val_size", val_size),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{option} is {value}; it must be at least 1")
    return _loader(name, data_dir=data_dir, download=download)(
        seed=seed,
        image_size=image_size,
        channels=channels,
        train_size=train_size,
        val_size=val_size,
        augment=augment,
    )


def _loader(name: str, *, data_dir: str | None, download: bool) -> Callable[..., LabeledData]:
    """Return the function that loads the set of that name.

    Raises:
        ConfigError: there is none.
    """
    if name in ("digits", "synthetic"):
        return digits if name == "digits" else synthetic
    if name in TORCHVISION_FILES:
        return partial(downloaded, name, data_dir=data_dir, download=download)
    kind, colon, path = name.partition(":")
    if kind == "imagefolder":
        return partial(imagefolder, name, path or data_dir or "")
    if colon:
        return partial(user_data, name, data_dir=data_dir, download=download)
    raise ConfigError(f"there is no data set {name!r}; {did_you_mean(name, DATA_SETS)}")
