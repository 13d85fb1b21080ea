"""Whether a module can be imported, found out without importing it."""

from __future__ import annotations

import importlib
import os
import re
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

__all__ = ["find_module"]

ANY_MODULE = re.compile(r"__path__|sys\.modules|meta_path")


def find_module(name: str) -> tuple[bool, ModuleSpec | None]:
    """Return whether a module may be importable, with the current directory on the path, and what would be loaded.

    Nothing is imported, not even the packages around it; a package that changes its own path may have any module.
    """
    importlib.invalidate_caches()
    top, *rest = name.split(".")
    if not all(part.isidentifier() for part in (top, *rest)):
        return False, None
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    except ValueError:  # loaded, from an unknown location
        return True, None
    for part in rest:
        if spec is None:
            return False, None
        inner = PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
        if inner is None:
            return _may_hold_any_module(spec), None
        spec = inner
    return spec is not None, spec


def _may_hold_any_module(spec: ModuleSpec) -> bool:
    """Return whether a module may create submodules that are not files in its folder, as `os` creates `os.path`."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return spec.submodule_search_locations is None
    try:
        return bool(ANY_MODULE.search(Path(spec.origin).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return True
