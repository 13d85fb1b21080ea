"""Call a function as soon as a module is imported, or at once if it is already."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportHook(MetaPathFinder):
    """Watches imports, which the other finders do, and calls what awaits a module, by its name."""

    def __init__(self, awaited: dict[str, Callable[[], None]]) -> None:
        self._awaited = dict(awaited)
        self._searching: set[str] = set()

    def begin(self) -> None:
        """Call for modules that are imported already, and wait for the others."""
        for name in list(self._awaited):
            if name in sys.modules:
                self._awaited.pop(name)()
        if self._awaited:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        self._awaited.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders return, whose loader then calls back.

        Args:
            fullname: of the module, dotted.
            path: of the package that is searched; None for `sys.path`.
            target: a module that is loaded again; None for a new one.
        """
        if fullname not in self._awaited or fullname in self._searching:
            return None
        self._searching.add(fullname)  # another hook that awaits this name asks here again
        try:
            found = (
                finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self
            )
            spec = next((one for one in found if one is not None), None)
        finally:
            self._searching.discard(fullname)
        if spec is None:
            return None
        loader: Any = spec.loader
        # An alias of ampcompare's own module, which is awaited under its own name.
        if loader is None or type(loader).__module__.startswith("ampcompare."):
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # of this hook, or of another one around it
            execute(module)
            callback = self._awaited.pop(fullname, None)
            if callback is not None:
                callback()

        loader.exec_module = exec_module
        return spec
