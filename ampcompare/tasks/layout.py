"""The layout of a folder of images: `train/CLASS/*.jpg` and `val/CLASS/*.jpg`. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from ampcompare.base.errors import ConfigError

__all__ = ["check_layout"]


def check_layout(root: str) -> None:
    """Check that a folder has `train` and `val`, with the same classes.

    Raises:
        ConfigError: it does not.
    """
    folder = Path(root)
    if not root or not folder.is_dir():
        raise ConfigError(
            f"imagefolder: there is no folder {root!r} that has train and val; write imagefolder:PATH, or imagefolder "
            "and --data-dir PATH"
        )
    missing = [part for part in ("train", "val") if not (folder / part).is_dir()]
    if missing:
        entries = sorted(entry.name for entry in folder.iterdir())[:5]
        raise ConfigError(
            f"{root} has no folder {' and no folder '.join(missing)}; it contains {', '.join(entries) or 'nothing'}"
        )
    train, val = ({entry.name for entry in (folder / part).iterdir() if entry.is_dir()} for part in ("train", "val"))
    for part, classes in (("train", train), ("val", val)):
        if not classes:
            raise ConfigError(f"{folder / part} has no folders; make one for each class, with its images inside")
    if train != val:
        differences = [
            f"only in {part}: {', '.join(sorted(names)[:5])}"
            for part, names in (("train", train - val), ("val", val - train))
            if names
        ]
        raise ConfigError(
            f"{root} has {len(train)} classes in train and {len(val)} in val that differ ({'; '.join(differences)}); "
            "both need the same folders"
        )
