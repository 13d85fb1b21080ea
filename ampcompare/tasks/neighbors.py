"""Imports of modules in the working directory by other modules there, after the factory of a user was resolved.

A user's model may import its neighbor in `forward`, or a data set in a worker of a DataLoader, which is forked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

__all__ = ["NeighborFinder", "install_finder"]

IMPORTERS = ("importlib", "_frozen_importlib", "_frozen_importlib_external")


class NeighborFinder(MetaPathFinder):
    """Finds a top-level module in a folder, for import statements in modules of the same folder only.

    It must be the last finder, so that a file with the name of a library never takes its place. Nor does a file with
    the name of a library that is not installed, when another library tries to import that one: the importing code is
    then not in the folder.

    Args:
        folder: where modules may import each other.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Submodules have a path, and Python's own finder looks there.
        if path is not None or not self._is_inside(_importing_code(sys._getframe(1))):
            return None
        return PathFinder.find_spec(fullname, [self.folder])

    def _is_inside(self, variables: Mapping[str, Any]) -> bool:
        """Return whether the top-level module of some code lies directly in the folder."""
        top = sys.modules.get(str(variables.get("__name__", "")).partition(".")[0])
        # A virtual environment inside the folder is not part of it: its packages lie deeper.
        return top is not None and any(os.path.realpath(parent) == self.folder for parent in _parents(top))


def _parents(module: ModuleType) -> list[str]:
    """Return the folders that a top-level module or package lies in; several for a namespace package."""
    if (paths := getattr(module, "__path__", None)) is not None:
        return [os.path.dirname(path) for path in paths]
    file = getattr(module, "__file__", None)
    return [os.path.dirname(file)] if file else []


def _importing_code(frame: FrameType | None) -> Mapping[str, Any]:
    """Return the global variables of the code that imports, which the machinery of imports calls for."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in IMPORTERS:
        frame = frame.f_back
    return {} if frame is None else frame.f_globals


def install_finder(folder: str) -> None:
    """Let the modules in `folder` import each other for the rest of this process."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, NeighborFinder)]
    if os.path.realpath(folder) not in {finder.folder for finder in finders}:
        sys.meta_path.append(NeighborFinder(folder))
