"""Check that a run directory can be made and written."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from ampcompare.base.errors import ConfigError

__all__ = ["check_output_dir", "check_output_name"]

DEEPEST = Path("cells", "0" * 12, "checkpoints.previous", "0" * 64)  # as long as any name below a run directory
MAX_SHOWN = 200


def check_output_name(folder: Path) -> None:
    """Check that a run directory of this name, with its files, can exist.

    Raises:
        ConfigError: it is too long, or below a file.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(folder.absolute() / DEEPEST)
    except (OSError, ValueError) as error:
        raise _cannot_make(folder, error) from None


def check_output_dir(folder: Path) -> None:
    """Create the run directory and check that files can be written there.

    Raises:
        ConfigError: it cannot be made or written.
    """
    check_output_name(folder)
    try:
        # One by one from the top: pathlib recurses once per level.
        missing = list(itertools.takewhile(lambda path: not os.path.isdir(path), (folder, *folder.parents)))
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
    except OSError as error:
        raise _cannot_make(folder, error) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the output folder {_shown(folder)} is not writable; choose another --output-dir")


def _cannot_make(folder: Path, error: OSError | ValueError) -> ConfigError:
    why = getattr(error, "strerror", None) or error  # a ValueError is about a null byte
    return ConfigError(f"cannot make the output folder {_shown(folder)}: {why}; choose another --output-dir")


def _shown(folder: Path) -> str:
    name = str(folder)
    return name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}... ({len(name):,} characters)"
