"""What the packages of this environment register under a group of entry points."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from importlib.metadata import EntryPoint
from typing import Any

__all__ = ["entry_points"]


def entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of a group; metadata is read again only where a folder of `sys.path` has changed."""
    return list(_read(tuple(map(_version, sys.path))).select(group=group))


@functools.lru_cache(maxsize=1)
def _read(_path: tuple[Any, ...]) -> Any:
    return importlib.metadata.entry_points()


def _version(folder: str) -> tuple[str, int, int]:
    """Return what changes where packages are installed into a folder, or another one has its name."""
    try:
        found = os.stat(folder or ".")
    except OSError:
        return folder, 0, 0
    return folder, found.st_ino, found.st_mtime_ns
