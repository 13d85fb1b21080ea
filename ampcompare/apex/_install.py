"""Let `import apex` and `import amp_C` find this package, whatever else on the path bears these names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["KERNELS", "ApexFinder", "install"]

HOME = "ampcompare.apex"
KERNELS = frozenset(
    {
        "apex_C",
        "bnp",
        "distributed_adam_cuda",
        "distributed_lamb_cuda",
        "fast_layer_norm",
        "fused_dense_cuda",
        "fused_layer_norm_cuda",
        "mlp_cuda",
        "scaled_masked_softmax_cuda",
        "scaled_upper_triang_masked_softmax_cuda",
        "syncbn",
        "xentropy_cuda",
    }
)


def real_name(alias: str) -> str | None:
    """Return the module that stands behind `apex`, `apex.x` or `amp_C`; None for any other name."""
    if alias == "apex" or alias.startswith("apex."):
        return HOME + alias[len("apex") :]
    return f"{HOME}.amp_C" if alias == "amp_C" else None


class ApexFinder(MetaPathFinder):
    """Resolve `apex`, its submodules and `amp_C` to the very modules of this package, and remember what was lacking.

    Attributes:
        missing: names that were asked for and are not here, written as the script knows them ("apex.contrib").
    """

    def __init__(self) -> None:
        self.missing: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that yields the real module; None leaves the name to the other finders."""
        if fullname.startswith(f"{HOME}."):
            # `from apex.x import y` asks for y as a submodule of the package before it gives up.
            spec = PathFinder.find_spec(fullname, path)
            if spec is None:
                self._miss("apex" + fullname[len(HOME) :])
            return spec
        real = real_name(fullname)
        if real is None:
            if fullname in KERNELS:
                self._miss(fullname)
            return None
        # Asking is not importing: scripts probe with importlib.util.find_spec.
        found = importlib.util.find_spec(real)
        if found is None:
            return None
        return ModuleSpec(fullname, _AliasLoader(real), is_package=found.submodule_search_locations is not None)

    def _miss(self, name: str) -> None:
        if name not in self.missing:
            self.missing.append(name)


class _AliasLoader(Loader):
    """Hand out a module that lives under another name."""

    def __init__(self, real: str) -> None:
        self._real = real
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just given the module the spec of its alias.
        module.__spec__ = self._spec
        _alias_loaded()


def _alias_loaded() -> None:
    """Enter all loaded modules under their aliases too.

    Importing `apex.amp._amp_state` in the ordinary way would bind the module over the state object of that name.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{HOME}."):
            sys.modules.setdefault("apex" + name[len(HOME) :], module)


def install() -> ApexFinder:
    """Make `apex` and `amp_C` mean this package in this process; calling it again changes nothing.

    It wins over an installed Apex and over a clone beside the script; modules of another `apex` that were imported
    before are forgotten, though who holds them keeps them.
    """
    for finder in sys.meta_path:
        if isinstance(finder, ApexFinder):
            return finder
    for name in list(sys.modules):
        if real_name(name) is not None:
            del sys.modules[name]
    finder = ApexFinder()
    sys.meta_path.insert(0, finder)
    return finder
