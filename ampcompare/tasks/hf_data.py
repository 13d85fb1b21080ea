"""Data sets of Hugging Face's `datasets`: a folder here, or a name on the hub. Columns are found by their types."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ampcompare.base.errors import ConfigError
from ampcompare.tasks.catalog import explain_missing_package, translate_errors

VALIDATION = ("validation", "valid", "val", "test")
SAVED = ("dataset_dict.json", "dataset_info.json")  # of `save_to_disk`


class LabeledImages:
    """Images, transformed from RGB of Pillow, and integer labels of two columns of a `datasets.Dataset`, map-style."""

    def __init__(self, rows: Any, image: str, label: str, transform: Callable[[Any], Any]) -> None:
        self.labels = [int(value) for value in rows[label]]
        self._rows = rows
        self._image = image
        self._transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._transform(self._rows[index][self._image].convert("RGB")), self.labels[index]


def image_parts_and_num_classes(
    name: str, transforms: Mapping[str, Callable[[Any], Any]]
) -> tuple[dict[str, LabeledImages], int]:
    """Return the images of `hf:PATH_OR_NAME`, transformed by part, and the number of classes."""
    parts = _load_parts(name)
    features = parts["train"].features
    image = _find_column(name, features, "images", {"Image": lambda feature: True})
    label = _find_column(
        name, features, "classes", {"ClassLabel": lambda feature: True, "Value": _is_integer}
    )
    samples = {part: LabeledImages(rows, image, label, transforms[part]) for part, rows in parts.items()}
    names = getattr(features[label], "names", None)
    return samples, len(names) if names else max(max(each.labels, default=0) for each in samples.values()) + 1


def text_parts(name: str) -> tuple[bytes, bytes]:
    """Return the texts of `hf:PATH_OR_NAME` for training and validation, a row per line, in UTF-8."""
    parts = _load_parts(name)
    column = _find_column(
        name, parts["train"].features, "texts", {"Value": lambda feature: "string" in feature.dtype}
    )
    train, val = ("\n".join(parts[part][column]).encode() for part in ("train", "val"))
    return train, val


def _load_parts(name: str) -> dict[str, Any]:
    with explain_missing_package(f"--data {name} needs", "datasets"):
        import datasets
    place = name.removeprefix("hf:")
    remedy = "give a folder that `save_to_disk` wrote or `load_dataset` reads, or the name of a data set on the hub"
    with translate_errors(f"--data {name} cannot be read", remedy):
        is_saved = any((Path(place) / file).is_file() for file in SAVED)
        loaded = datasets.load_from_disk(place) if is_saved else datasets.load_dataset(place)
    splits = dict(loaded) if isinstance(loaded, Mapping) else {"train": loaded}
    val = next((split for split in VALIDATION if split in splits), None)
    if "train" not in splits or val is None:
        raise ConfigError(
            f"--data {name} has the splits {', '.join(splits)}; it needs train, and one of {', '.join(VALIDATION)}"
        )
    return {"train": splits["train"], "val": splits[val]}


def _find_column(
    name: str, features: Mapping[str, Any], what: str, kinds: Mapping[str, Callable[[Any], bool]]
) -> str:
    """Return the one column of the first kind, a class of features, that any column has and that will do."""
    for kind, is_usable in kinds.items():
        usable = [
            column
            for column, feature in features.items()
            if type(feature).__name__ == kind and is_usable(feature)
        ]
        if len(usable) == 1:
            return usable[0]
        if usable:
            break
    columns = ", ".join(f"{column} ({_type_name(feature)})" for column, feature in features.items())
    raise ConfigError(
        f"--data {name} needs one column of {what}, and has the columns {columns}; remove or rename others with "
        "`remove_columns`, and save it again"
    )


def _type_name(feature: Any) -> str:
    """Return the type of a column as messages name it: of numbers and texts their dtype, else the class of feature."""
    return str(
        getattr(feature, "dtype", None) if type(feature).__name__ == "Value" else type(feature).__name__
    )


def _is_integer(feature: Any) -> bool:
    return str(feature.dtype).startswith(("int", "uint"))
