"""The names of data sets and models, and whether each can be used here; answers without torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

__all__ = [
    "BUILTIN_MODELS",
    "DATA_SETS",
    "DEFAULT_DATA_DIR",
    "TORCHVISION_FILES",
    "close_matches",
    "list_data",
    "list_models",
    "missing_files",
]

DEFAULT_DATA_DIR = "data"
_MOST_NAMES = 12

DATA_SETS = {
    "digits": "1,797 handwritten digits, 8x8, 10 classes, bundled with scikit-learn",
    "synthetic": "patterns in noise, 32x32 in color, 10 classes, made on the spot",
    "mnist": "70,000 handwritten digits, 28x28, 10 classes",
    "fashion-mnist": "70,000 pieces of clothing, 28x28, 10 classes",
    "cifar10": "60,000 photographs, 32x32 in color, 10 classes",
    "cifar100": "60,000 photographs, 32x32 in color, 100 classes",
    "imagefolder:PATH": "your images, in PATH/train/CLASS and PATH/val/CLASS",
    "module:factory": "your function that returns (train, val) or (train, val, num_classes)",
}

BUILTIN_MODELS = {
    "convnet": "convolutions with batch norm, pooled; 66 thousand parameters at its default width",
    "mlp": "fully connected layers",
    "transformer": "pre-norm self-attention over patches or rows",
}

# The folder below --data-dir, and files in it without which torchvision finds nothing.
TORCHVISION_FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{
        name: (
            f"{folder}/raw",
            tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")),
        )
        for name, folder in (("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST"))
    },
    "cifar10": ("cifar-10-batches-py", (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch", "batches.meta")),
    "cifar100": ("cifar-100-python", ("train", "test", "meta")),
}


def list_data(data_dir: str | Path | None = None) -> list[tuple[str, bool, str]]:
    """Return (name, available, reason) of each data set.

    Args:
        data_dir: where downloaded sets lie; None is the folder `data`.
    """
    rows = []
    for name, description in DATA_SETS.items():
        available, reason = _available(name, Path(data_dir or DEFAULT_DATA_DIR))
        rows.append((name, available, f"{description}; {reason}" if reason else description))
    return rows


def list_models() -> list[tuple[str, bool, str]]:
    """Return (name, available, reason) of each model, those of torchvision in one row."""
    found = find_spec("torchvision") is not None
    return [
        *((name, True, description) for name, description in BUILTIN_MODELS.items()),
        (
            "any torchvision classifier",
            found,
            "by its name, as resnet18 or vit_b_16"
            if found
            else "torchvision is not installed: pip install torchvision",
        ),
        ("module:factory", True, "your function that returns a torch.nn.Module"),
    ]


def missing_files(name: str, data_dir: Path) -> list[str]:
    """Return which files of a torchvision set are not in their folder below `data_dir`."""
    folder, files = TORCHVISION_FILES[name]
    return [file for file in files if not (data_dir / folder / file).is_file()]


def close_matches(name: str, known: Iterable[str]) -> str:
    """Return the end of an error sentence that names what `name` may have been meant to be."""
    known = list(known)
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if matches:
        return f"did you mean {' or '.join(matches)}?"
    rest = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return f"known are {', '.join(known[:_MOST_NAMES])}{rest}"


def _available(name: str, data_dir: Path) -> tuple[bool, str]:
    if name == "digits" and find_spec("sklearn") is None:
        return False, "scikit-learn is not installed: pip install scikit-learn"
    if name == "imagefolder:PATH" or name in TORCHVISION_FILES:
        if find_spec("torchvision") is None:
            return False, "torchvision is not installed: pip install torchvision"
        if find_spec("PIL") is None:
            return False, "Pillow is not installed: pip install pillow"
    if name in TORCHVISION_FILES and missing_files(name, data_dir):
        return (
            False,
            f"not in {data_dir / TORCHVISION_FILES[name][0]}: pass --download, or --data-dir with its folder",
        )
    return True, ""
