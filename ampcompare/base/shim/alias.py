"""Modules of the engine under the names that Apex has for them."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

ENGINE = "ampcompare.apex"


class AliasLoader(Loader):
    """Return a module that is loaded under another name.

    Args:
        real: the name that it is loaded by.
        under: packages whose loaded modules get their aliases too, as `_alias_loaded_modules` does.
    """

    def __init__(self, real: str, under: Sequence[str] = ("apex",)) -> None:
        self._real = real
        self._under = under
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just set the spec of the alias on the module.
        module.__spec__ = self._spec
        _alias_loaded_modules(self._under)


def _alias_loaded_modules(package_names: Sequence[str]) -> None:
    """Register all loaded modules, of those under some packages, under their aliases too.

    A regular import of `apex.amp._amp_state` would replace the state object of that name by the module.
    """
    for name, module in list(sys.modules.items()):
        alias = "apex" + name[len(ENGINE) :]
        if name.startswith(f"{ENGINE}.") and any(
            alias == one or alias.startswith(f"{one}.") for one in package_names
        ):
            sys.modules.setdefault(alias, module)
