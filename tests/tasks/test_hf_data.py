"""Data sets of Hugging Face in local folders: columns are found by their types."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.tasks.image_data import load_data
from ampcompare.tasks.lm import load_text_data

datasets = pytest.importorskip("datasets", reason="needs the extra hf")


def _save(folder: Path, features: dict[str, Any], splits: dict[str, dict[str, list[Any]]]) -> str:
    parts = {
        split: datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        for split, columns in splits.items()
    }
    datasets.DatasetDict(parts).save_to_disk(str(folder))
    return f"hf:{folder}"


def _images(count: int) -> list[Any]:
    return [np.full((9, 12, 3), 10 * index, dtype=np.uint8) for index in range(count)]


def test_images_and_classes(tmp_path: Path) -> None:
    """Whatever the columns are called, images become square tensors of three channels, with their labels."""
    from ampcompare.tasks.torchvision_loader import load_torchvision

    load_torchvision()
    features = {
        "picture": datasets.Image(),
        "width": datasets.Value("int64"),
        "kind": datasets.ClassLabel(names=["cat", "dog", "owl"]),
    }
    train = {"picture": _images(6), "width": [12] * 6, "kind": [0, 1, 2, 0, 1, 2]}
    test = {"picture": _images(3), "width": [12] * 3, "kind": [2, 1, 0]}
    name = _save(tmp_path / "pets", features, {"train": train, "test": test})
    data = load_data(name, seed=0, image_size=8, augment=False)
    assert (data.num_train, data.num_val, data.num_classes, data.sample_shape) == (6, 3, 3, (3, 8, 8))
    samples, labels = next(iter(data.val_batches(3, device="cpu")))
    assert samples.shape == (3, 3, 8, 8)
    assert sorted(labels.tolist()) == [0, 1, 2]


def test_integers_are_classes_where_none_are_named(tmp_path: Path) -> None:
    """One column of integers is that of the labels, and the largest gives the number of classes."""
    features = {"image": datasets.Image(), "y": datasets.Value("int32")}
    columns = {"image": _images(4), "y": [0, 4, 1, 2]}
    data = load_data(
        _save(tmp_path / "d", features, {"train": columns, "validation": columns}), seed=0, image_size=8
    )
    assert data.num_classes == 5


@pytest.mark.parametrize(
    ("features", "splits", "message"),
    [
        (
            {"image": "Image", "a": "int64", "b": "int64"},
            ("train", "test"),
            r"one column of classes, .*a \(int64\), b",
        ),
        (
            {"text": "string", "label": "int64"},
            ("train", "test"),
            r"one column of images, .*text \(string\), label",
        ),
        (
            {"image": "Image", "label": "int64"},
            ("train",),
            "has the splits train; it needs train, and one of",
        ),
    ],
)
def test_what_it_lacks_is_named(
    tmp_path: Path, features: dict[str, str], splits: tuple[str, ...], message: str
) -> None:
    kinds = {
        name: datasets.Image() if kind == "Image" else datasets.Value(kind) for name, kind in features.items()
    }
    values = {"Image": _images(2), "int64": [0, 1], "string": ["x", "y"]}
    columns = {name: values[kind] for name, kind in features.items()}
    name = _save(tmp_path / "d", kinds, dict.fromkeys(splits, columns))
    with pytest.raises(ConfigError, match=message):
        load_data(name, seed=0, image_size=8)


def test_texts(tmp_path: Path) -> None:
    """For language models the one column of texts is read, a row per line."""
    columns = {"id": [1, 2], "body": ["one line", "another"]}
    features = {"id": datasets.Value("int64"), "body": datasets.Value("string")}
    name = _save(tmp_path / "texts", features, {"train": columns, "validation": columns})
    data = load_text_data(name, seed=0, sequence_length=4)
    assert bytes(data.train["tokens"][0].tolist()) == b"one l"
