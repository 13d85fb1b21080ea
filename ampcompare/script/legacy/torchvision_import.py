"""Let a script's `import torchvision` work with a torch without CUDA."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ampcompare.base.errors import BackendUnavailable

__all__ = ["install"]


class _Finder(MetaPathFinder):
    """Import torchvision by `load_torchvision`, the first time that it is imported."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision" or self._busy:
            return None
        self._busy = True
        try:
            from ampcompare.tasks.torchvision_loader import load_torchvision

            module = load_torchvision()
        except (BackendUnavailable, ImportError):
            return None  # the script's own import reports why
        finally:
            self._busy = False
        return ModuleSpec(fullname, _Loaded(module), is_package=True)


class _Loaded(Loader):
    """Returns a module that is already loaded."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def install() -> None:
    """Watch for the import of torchvision in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
