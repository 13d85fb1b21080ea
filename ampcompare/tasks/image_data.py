"""From the name of a data set to its batches: bundled, generated, torchvision's, folders of images, a user's."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from filelock import FileLock
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from ampcompare.base.errors import AmpCompareError, ConfigError, EnvironmentUnfit
from ampcompare.base.files.read import open_regular_file
from ampcompare.base.formatting import format_few_names
from ampcompare.tasks.catalog import (
    DEFAULT_DATA_DIR,
    TORCHVISION_FILES,
    check_data,
    explain_missing_package,
    missing_torchvision_files,
    translate_errors,
    why_files_missing,
)
from ampcompare.tasks.data import (
    LabeledData,
    Part,
    SampleOptions,
    choose_indices_evenly,
    derive_seed,
    global_generators_restored,
    seed_global_generators,
    seeded_generator,
)
from ampcompare.tasks.factory import factory_errors_reported, resolve_factory, select_arguments
from ampcompare.tasks.hf_data import image_parts_and_num_classes
from ampcompare.tasks.in_memory import InMemoryImages, make_memory_data, resize_images
from ampcompare.tasks.torchvision_loader import load_torchvision

_DEFAULT_SIZE = 224
# What ImageNet's usual validation resizes to before it crops 224.
_RESIZE_RATIO = 256 / 224
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_NETWORK_TIMEOUT_SECONDS = 15.0
_LAYOUT = "they lie in PATH/train/CLASS and PATH/val/CLASS; write imagefolder:PATH, or imagefolder and --data-dir PATH"
_WANTED = (
    "it must return (train, val) or (train, val, num_classes), two data sets with a length of at least 1 whose items "
    "are (tensor of one dimension or more, int)"
)
_DIGITS_HOLDOUT = 5
_DIGITS_MEAN = 4.88  # of pixel values from 0 to 16
_DIGITS_STD = 6.02
_DIGITS_MOVED_SHARE = 0.1
_SYNTHETIC_CLASSES = 10
_SYNTHETIC_SIZE = 32
_SYNTHETIC_TRAIN = 2048
_SYNTHETIC_VAL = 512
_SYNTHETIC_CONTRAST = 0.5


def _load_imagefolder(name: str, root: str, options: SampleOptions) -> _DataLoaderData:
    """Read color images below `root`, one folder for each class, the same classes in `train` and `val`.

    Training images are random crops, resized and randomly flipped; validation images, and training
    images without `augment`, are resized and cropped at the center. Both are normalized as for ImageNet.
    """
    vision = load_torchvision()
    parts: dict[str, _SamplesOfPart] = {}
    classes: dict[str, set[str]] = {}
    for part, transform in _photo_transforms(name, options).items():
        with translate_errors(f"imagefolder: no images in {Path(root) / part}", _LAYOUT, errors=(OSError,)):
            images = vision.datasets.ImageFolder(
                str(Path(root) / part), transform=transform, loader=_open_image
            )
        parts[part] = _SamplesOfPart(images, f"the {part} folder of {root}", torch.tensor(images.targets))
        classes[part] = set(images.classes)
    if apart := sorted(classes["train"] ^ classes["val"]):
        raise ConfigError(
            f"{root} has {format_few_names(apart)} in one of train and val only; both need the same folders"
        )
    size = options.image_size or _DEFAULT_SIZE
    return _DataLoaderData.from_parts(name, parts, options, len(images.classes), (3, size, size))


def _photo_transforms(name: str, options: SampleOptions) -> dict[str, Callable[[Any], Tensor]]:
    """Return what makes a tensor of a color image, float32 (3, size, size), for `train` and `val`."""
    size = options.image_size or _DEFAULT_SIZE
    if options.channels not in (None, 3):
        raise ConfigError(f"{options.channels} channels were requested, but {name} gives images of 3")
    transforms = load_torchvision().transforms
    finish = [transforms.ToTensor(), transforms.Normalize(_IMAGENET_MEAN, _IMAGENET_STD)]
    center = [transforms.Resize(round(size * _RESIZE_RATIO)), transforms.CenterCrop(size)]
    random = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    return {
        "train": transforms.Compose([*(random if options.augment else center), *finish]),
        "val": transforms.Compose([*center, *finish]),
    }


def _load_hf_images(name: str, options: SampleOptions) -> _DataLoaderData:
    """Read images and classes of a data set of Hugging Face, cropped and normalized as those of a folder."""
    images, num_classes = image_parts_and_num_classes(name, _photo_transforms(name, options))
    parts = {
        part: _SamplesOfPart(images[part], f"the {part} split of {name}", torch.tensor(images[part].labels))
        for part in ("train", "val")
    }
    size = options.image_size or _DEFAULT_SIZE
    return _DataLoaderData.from_parts(name, parts, options, num_classes, (3, size, size))


def _open_image(path: str) -> Any:
    with explain_missing_package("images are read with", "Pillow"):
        from PIL import Image
    with (  # Pillow's error for a damaged file depends on the format
        translate_errors(f"{path} cannot be read as an image", "repair or remove it"),
        os.fdopen(open_regular_file(Path(path)), "rb") as file,
        Image.open(file) as image,
    ):
        return image.convert("RGB")


@dataclass(frozen=True)
class _TorchvisionSetSpec:
    """The name of a set in torchvision, its normalization and its augmentation."""

    dataset: str
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    margin: int
    flip: bool


_KINDS = {
    "mnist": _TorchvisionSetSpec("MNIST", 10, (0.1307,), (0.3081,), margin=2, flip=False),
    "fashion-mnist": _TorchvisionSetSpec("FashionMNIST", 10, (0.2860,), (0.3530,), margin=2, flip=True),
    "cifar10": _TorchvisionSetSpec(
        "CIFAR10", 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), margin=4, flip=True
    ),
    "cifar100": _TorchvisionSetSpec(
        "CIFAR100", 100, (0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762), margin=4, flip=True
    ),
}


class SmallImages(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images uint8 (N, C, H, W), each cropped and flipped at random, normalized and resized when it is read."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        kind: _TorchvisionSetSpec,
        *,
        image_size: int | None,
        augment: bool,
    ) -> None:
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


def _load_torchvision_data(
    name: str, data_dir: str | None, options: SampleOptions, *, download: bool
) -> _DataLoaderData:
    """Load one of torchvision's small sets from `data_dir`, downloading it first if `download` is set."""
    kind = _KINDS[name]
    channels = options.channels
    image_size = options.image_size
    folder = Path(data_dir or DEFAULT_DATA_DIR)
    if channels is not None and len(kind.mean) not in (1, channels):
        raise ConfigError(
            f"{channels} channels were requested, but {name} has {len(kind.mean)}; only gray images can be repeated"
        )
    dataset = getattr(load_torchvision().datasets, kind.dataset)
    if download and missing_torchvision_files(name, folder):
        _download_set(name, dataset, folder)
    if reason := why_files_missing(name, folder):
        raise ConfigError(f"{name} is {reason}")
    parts = {}
    for part in ("train", "val"):
        where = f"{name} in {folder / TORCHVISION_FILES[name][0]}"
        with translate_errors(f"{where} cannot be read", "delete that folder and pass --download"):
            images, labels = _read_images_and_labels(dataset(str(folder), train=part == "train"))
        samples = SmallImages(
            images, labels, kind, image_size=image_size, augment=options.augment and part == "train"
        )
        parts[part] = _SamplesOfPart(samples, f"the {part} part of {name}", labels)
    height, width = (image_size, image_size) if image_size is not None else images.shape[2:]
    return _DataLoaderData.from_parts(
        name, parts, options, kind.num_classes, (channels or len(kind.mean), height, width)
    )


def _read_images_and_labels(samples: Any) -> tuple[Tensor, Tensor]:
    """Return uint8 images (N, C, H, W) and int64 labels (N,)."""
    images = torch.as_tensor(samples.data)
    images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return images.contiguous(), torch.as_tensor(samples.targets, dtype=torch.int64)


def _download_set(name: str, dataset: Any, folder: Path) -> None:
    """Download a set below `folder`; other processes that need it wait for the first."""
    remedy = f"copy it to {folder / TORCHVISION_FILES[name][0]} from a machine with a network, or use --data digits"
    what, errors = f"{name} could not be downloaded to {folder}", (OSError, RuntimeError)
    before = socket.getdefaulttimeout()
    with (
        translate_errors(what, remedy, errors=errors, fault=EnvironmentUnfit),
        contextlib.redirect_stdout(sys.stderr),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder / f".{name}.lock")):
            socket.setdefaulttimeout(_NETWORK_TIMEOUT_SECONDS)  # torchvision sets none
            try:
                if missing_torchvision_files(name, folder):
                    dataset(str(folder), train=True, download=True)
            finally:
                socket.setdefaulttimeout(before)


def _load_user_data(
    path: str, data_dir: str | None, options: SampleOptions, *, download: bool
) -> LabeledData:
    """Call the user's factory and build a data set from what it returns.

    It is called with those of `seed`, `data_dir`, `download`, `image_size`, `channels`, `train_size`, `val_size` and
    `augment` that it names as parameters. Global generators are seeded with a constant while it runs, so a random split
    inside it is the same for every seed and arm, and are restored afterwards.
    """
    factory, channels = resolve_factory(path), options.channels
    taken = select_arguments(factory, {**vars(options), "data_dir": data_dir, "download": download})
    with global_generators_restored():
        seed_global_generators(derive_seed("user's factory"))
        with factory_errors_reported(path, "calling it"):
            result = factory(**taken)
        is_whole = isinstance(result, LabeledData)
        for option in ("image_size", *(("train_size", "val_size") if is_whole else ())):
            if (value := getattr(options, option)) is not None and option not in taken:
                raise ConfigError(
                    f"factory {path} has no parameter {option}, and {value} was requested; add it"
                )
        if is_whole:
            return cast(LabeledData, result)
        train, val, num_classes = _parts_and_num_classes_of_result(path, result)
        sample = [_first_sample(path, part, samples) for part, samples in (("train", train), ("val", val))][
            -1
        ]
        if channels is not None and sample.shape[0] not in (1, channels):
            raise ConfigError(
                f"factory {path} gives samples of shape {tuple(sample.shape)}, and the model takes {channels}; "
                "return samples that fit, or choose another model"
            )
        classes = _count_classes(path, train) if num_classes is None else num_classes
    parts = {
        part: _SamplesOfPart(samples, f"the {part} data set of factory {path}")
        for part, samples in (("train", train), ("val", val))
    }
    shape = tuple(sample.shape) if channels is None or sample.shape[0] != 1 else (channels, *sample.shape[1:])
    chosen_already: dict[str, Any] = {f"{part}_size": None for part in parts if f"{part}_size" in taken}
    return _DataLoaderData.from_parts(path, parts, replace(options, **chosen_already), classes, shape)


def _type_of_value_text(values: Any) -> str:
    """Return the type of a value; of a tuple or list those in it, with their sizes."""
    if not isinstance(values, tuple | list):
        return type(values).__name__
    described = []
    for value in values:
        size = ""
        if isinstance(value, Tensor):
            size = f" of {tuple(value.shape)}"
        elif isinstance(value, Sized):
            size = f" of {len(value)}"
        described.append(type(value).__name__ + size)
    return f"({', '.join(described)})"


def _parts_and_num_classes_of_result(path: str, result: Any) -> tuple[Any, Any, int | None]:
    """Return both parts that a factory returned, and the number of classes where it has that."""
    is_tuple = isinstance(result, tuple | list) and len(result) in (2, 3)
    has_samples = is_tuple and all(
        hasattr(part, "__getitem__") and hasattr(part, "__len__") for part in result[:2]
    )
    count = result[2] if is_tuple and len(result) == 3 else 1
    if not has_samples or not isinstance(count, int) or count < 1 or not all(map(len, result[:2])):
        raise ConfigError(f"factory {path} returned {_type_of_value_text(result)}; {_WANTED}")
    return *result[:2], count if len(result) == 3 else None


def _first_sample(path: str, part: str, samples: Any) -> Tensor:
    """Return the first sample after checking what the data set gives."""
    with factory_errors_reported(path, f"reading the first item of {part}"):
        item = samples[0]
    is_pair = isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Tensor)
    if not is_pair or item[0].ndim == 0:
        raise ConfigError(f"factory {path}: an item of {part} is {_type_of_value_text(item)}; {_WANTED}")
    return cast(Tensor, item[0])


def _count_classes(path: str, samples: Any) -> int:
    """Return 1 + the largest label, after `classes` or `targets` if the data set has them, else by reading it once."""
    classes = getattr(samples, "classes", None)
    if isinstance(classes, (list, tuple)):
        return len(classes)
    with factory_errors_reported(path, "reading the labels of train"):
        targets = getattr(samples, "targets", None)
        labels = [samples[i][1] for i in range(len(samples))] if targets is None else targets
        return int(torch.as_tensor(labels).max()) + 1


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
        name: one of `list_data`, `imagefolder:PATH`, `hf:PATH_OR_NAME`, or `package.module:factory`.
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
    options = SampleOptions(seed, image_size, channels, train_size, val_size, augment)
    for option in ("image_size", "channels", "train_size", "val_size"):
        if (value := getattr(options, option)) is not None and value < 1:
            raise ConfigError(f"{option} is {value}; it must be at least 1")
    check_data(name)
    if name in ("digits", "synthetic"):
        return load_digits_data(options) if name == "digits" else _make_synthetic_images(options)
    if name in TORCHVISION_FILES:
        return _load_torchvision_data(name, data_dir, options, download=download)
    kind, _, path = name.partition(":")
    if kind == "imagefolder":
        return _load_imagefolder(name, path or data_dir or "", options)
    if kind == "hf":
        return _load_hf_images(name, options)
    return _load_user_data(name, data_dir, options, download=download)


Key: TypeAlias = tuple[int, int]


class _SamplesOfPart(NamedTuple):
    """A part of a data set, map-style."""

    samples: Any
    what: str  # it is called in errors
    labels: Tensor | None = None  # over which samples are spread


@dataclass
class _SamplesByEpochAndPosition(Dataset[tuple[Tensor, int]]):
    """A data set whose keys are (epoch, position): the epoch travels with each request, so workers can outlive it."""

    samples: Any
    positions: Tensor  # which of the samples to use, int64
    name: str
    purpose: str  # part of every sample's seed; keeps training and validation apart
    seed: int
    num_classes: int
    channels: int | None  # repeat gray images this many times; None does not change samples

    def __len__(self) -> int:
        return len(self.positions)

    def __getitems__(self, keys: Sequence[Key]) -> list[tuple[Tensor, int]]:
        """Return the samples of one batch, seeding the global generators before each; torch's loader calls this."""
        batch = []
        with global_generators_restored():
            for epoch, position in keys:
                index = int(self.positions[position])
                seed_global_generators(derive_seed(self.purpose, self.seed, epoch, index))
                sample, label = self.samples[index]
                if self.channels is not None and sample.shape[0] == 1:
                    sample = sample.expand(self.channels, *sample.shape[1:])
                if not 0 <= label < self.num_classes:
                    raise ConfigError(
                        f"{self.name}: sample {index} of {self.purpose} has the label {label}, "
                        f"and labels of {self.num_classes} classes are 0 to {self.num_classes - 1}"
                    )
                batch.append((sample, int(label)))
        return batch


class _BatchSampler:
    """The batch sampler of a loader that is kept between epochs; the batches of each pass are set from outside."""

    def __init__(self) -> None:
        self.epoch = self.passes = 0
        self.batches: Sequence[Tensor] = []

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        return ([(epoch, position) for position in batch.tolist()] for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@dataclass(frozen=True, eq=False)
class _DataLoaderData(LabeledData):
    """Samples prepared by a DataLoader.

    Worker processes are kept between epochs, and beginning an epoch ends an unfinished one.
    """

    train: _SamplesByEpochAndPosition = field(repr=False)
    val: _SamplesByEpochAndPosition = field(repr=False)
    _loaders: dict[tuple[Part, int, bool], tuple[_BatchSampler, DataLoader[tuple[Tensor, int]]]] = field(
        default_factory=dict, repr=False
    )

    @classmethod
    def from_parts(
        cls,
        name: str,
        parts: Mapping[str, _SamplesOfPart],
        options: SampleOptions,
        num_classes: int,
        sample_shape: tuple[int, ...],
    ) -> _DataLoaderData:
        """Return the data set of two parts, of as many of their samples as are wanted."""
        keyed = {}
        for part, (samples, what, labels) in parts.items():
            chosen = choose_indices_evenly(
                len(samples), options.sizes_by_part[part], what=what, labels=labels
            )
            keyed[part] = _SamplesByEpochAndPosition(
                samples, chosen, name, part, options.seed, num_classes, options.channels
            )
        return cls(
            name,
            num_train=len(keyed["train"]),
            num_val=len(keyed["val"]),
            seed=options.seed,
            num_classes=num_classes,
            sample_shape=sample_shape,
            train=keyed["train"],
            val=keyed["val"],
        )

    def _read_batches(
        self,
        part: Part,
        epoch: int,
        batches: Sequence[Tensor],
        device: torch.device,
        workers: int,
        pin_memory: bool | None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        key = part, workers, device.type == "cuda" and pin_memory is not False
        if key not in self._loaders:
            self._loaders[key] = self._sampler_and_loader(*key)
        sampler, loader = self._loaders[key]
        number = sampler.passes + 1
        sampler.epoch = epoch
        sampler.batches = batches
        sampler.passes = number
        for samples, labels in _batches_with_short_errors(iter(loader)):
            if sampler.passes != number:
                # Persistent workers serve one pass: this iterator would yield batches of the newer one.
                raise RuntimeError(
                    f"an epoch of {self.name} was read after a later one had started; read one epoch at a time"
                )
            yield samples.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def _sampler_and_loader(
        self, part: Part, workers: int, pin: bool
    ) -> tuple[_BatchSampler, DataLoader[tuple[Tensor, int]]]:
        sampler = _BatchSampler()
        return sampler, DataLoader(
            self.train if part == "train" else self.val,
            batch_sampler=sampler,
            num_workers=workers,
            pin_memory=pin,
            persistent_workers=workers > 0,
            # A loader draws a base seed at each pass, and would draw it from the global generator.
            generator=torch.Generator(),
        )


def _batches_with_short_errors(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches; raise an error of a worker with its own one-line message."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except AmpCompareError as error:
            # The loader puts the worker's whole traceback into the message; its last line is the error.
            text = str(error).strip().rpartition("\n")[2]
            kind = type(error)
            raise kind(text.removeprefix(f"{kind.__module__}.{kind.__qualname__}: ")) from error
        yield batch


@cache
def _digit_images_and_labels(load_digits: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    """Return all digits and their labels, which scikit-learn reads from a compressed table of text, in 0.1 s."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32)[:, None]
    return images, torch.from_numpy(bunch.target).to(torch.int64)


def load_digits_data(options: SampleOptions) -> InMemoryImages:
    """Load scikit-learn's digits: 1,437 for training, 360 for validation, of mean 0 and standard deviation 1.

    Every fifth digit of each class is for validation, whatever the seed. Augmentation shifts one in ten images by up
    to one pixel: the digits fill their frame, and shifting all of them cuts off so much that accuracy stays below 97 %.
    """
    with explain_missing_package("digits need", "scikit-learn"):
        from sklearn.datasets import load_digits
    images, labels = _digit_images_and_labels(load_digits)
    images = (images - _DIGITS_MEAN) / _DIGITS_STD
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    held_out[torch.argsort(labels, stable=True)[::_DIGITS_HOLDOUT]] = True
    return make_memory_data(
        "digits",
        (images[~held_out], labels[~held_out]),
        (images[held_out], labels[held_out]),
        options,
        num_classes=10,
        moved_share=_DIGITS_MOVED_SHARE,
        background=-_DIGITS_MEAN / _DIGITS_STD,
    )


def _make_synthetic_images(options: SampleOptions) -> InMemoryImages:
    """Generate noisy images of ten smooth patterns, the same ones for every seed.

    By default 2048 images for training and 512 for validation, of 3 channels and 32 pixels. Training images are shifted
    by up to one pixel.
    """
    size, planes = options.image_size or _SYNTHETIC_SIZE, options.channels or 3
    draws = seeded_generator("synthetic patterns", planes)
    patterns = resize_images(torch.randn(_SYNTHETIC_CLASSES, planes, 4, 4, generator=draws), size)
    return make_memory_data(
        "synthetic",
        _draw_noisy_images_and_labels(patterns, "training", options.train_size or _SYNTHETIC_TRAIN),
        _draw_noisy_images_and_labels(patterns, "validation", options.val_size or _SYNTHETIC_VAL),
        replace(options, image_size=None, channels=None, train_size=None, val_size=None),
        num_classes=_SYNTHETIC_CLASSES,
        moved_share=1.0,
        background=0.0,
    )


def _draw_noisy_images_and_labels(patterns: Tensor, part: str, count: int) -> tuple[Tensor, Tensor]:
    """Return `count` images of the patterns, classes in turn, with unit noise; float32 and int64."""
    labels = torch.arange(count) % len(patterns)
    noise = torch.randn(
        count, *patterns.shape[1:], generator=seeded_generator(f"synthetic {part}", *patterns.shape[1:])
    )
    return noise.add_(patterns[labels], alpha=_SYNTHETIC_CONTRAST), labels
