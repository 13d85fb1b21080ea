"""Modules that are loaded but hidden: an import finds them, by the path of the process, without executing them again.

For `fork_server.py`. Torch, ampcompare and what they import are found by a normal import, through `sys.path` and past
the finders that a process installs; a copy of ampcompare in another folder is another package.
"""

import builtins
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

LEADERS = (
    "numpy",
    "torch",
    "torch._dynamo",
    "pydantic",
    "click",
    "rich.live",
    "yaml",
    "psutil",
    "scipy.stats",
)
OWN = (
    "ampcompare.experiment.run_plan",
    "ampcompare.script.arm_process",
    "ampcompare.script.process.execute",
    "ampcompare.script.examination.rewrite_run",
    "ampcompare.base.processes.server",
    "ampcompare.experiment.launch.worker.cell",
)
EXECUTED = ("ampcompare.base.environment.first_path",)  # which looks at the command line


def _others() -> dict[str, ModuleType]:
    """Return the modules of packages that come from files and are not of the standard library."""
    return {
        name: module
        for name, module in sys.modules.items()
        if (first := name.partition(".")[0]) not in sys.stdlib_module_names
        and (spec := getattr(sys.modules.get(first), "__spec__", None)) is not None
        and spec.has_location
        and spec.name == first  # no second name of a module, such as scipy gives one
    }


class Group:
    """Modules of one package that one import loaded, and the packages that it loaded before them."""

    def __init__(self, modules: dict[str, ModuleType], needs: Sequence[str]) -> None:
        self.modules = modules
        self._needs = needs

    def bring_back(self) -> None:
        """Put the modules into `sys.modules`; what they need is imported, as others may wait for that."""
        for name in self._needs:
            if name not in sys.modules:
                importlib.import_module(name)
        for name, module in self.modules.items():
            sys.modules.setdefault(name, module)


class Hidden:
    """Finds modules that are loaded but not in `sys.modules`, where `sys.path` leads to the same file."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = {name: group for group in groups for name in group.modules}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the path leads to, with a loader that brings back the module instead of executing it."""
        group = self._groups.get(fullname)
        spec = group and PathFinder.find_spec(fullname, path)
        if not group or not spec:
            return None
        module = group.modules[fullname]
        if module.__spec__ is None or module.__spec__.origin != spec.origin:
            return None
        spec.loader = Loaded(module, group)
        return spec


class Loaded(Loader):
    """A loader of a module that is loaded."""

    def __init__(self, module: ModuleType, group: Group) -> None:
        self._module, self._spec, self._group = module, module.__spec__, group

    def __getattr__(self, name: str) -> Any:
        """Read code and files of the module by its own loader, as `runpy` does."""
        return getattr(self._spec and self._spec.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Bring back the other modules of its group."""
        module.__spec__ = self._spec
        self._group.bring_back()


def own_groups() -> list[Group]:
    """Import what most commands need of ampcompare, and return a group for each module, and for each further package.

    A module of ampcompare brings back what it has imported, and no other. None has a state yet, nor changes torch.
    """
    before = set(_others())
    needs: dict[str, list[str]] = {}
    plain_import, by_name = builtins.__import__, importlib.import_module

    def noted(
        name: str, globals: Any = None, locals: Any = None, parts: Any = (), level: int = 0
    ) -> ModuleType:
        module: ModuleType = plain_import(name, globals, locals, parts, level)
        full = importlib.util.resolve_name("." * level + name, globals["__package__"]) if level else name
        found = needs.setdefault((globals or {}).get("__name__", ""), [])
        found += [one for one in (full, *(f"{full}.{part}" for part in parts or ())) if one in sys.modules]
        return module

    def noted_by_name(name: str, package: str | None = None) -> ModuleType:
        needs.setdefault(sys._getframe(1).f_globals["__name__"], []).append(name)
        return by_name(name, package)

    builtins.__import__, importlib.import_module = noted, noted_by_name  # type: ignore[assignment]
    try:
        package = importlib.import_module("ampcompare.cli")
        for found in pkgutil.iter_modules(package.__path__, "ampcompare.cli."):
            importlib.import_module(found.name)
        for name in OWN:
            importlib.import_module(name)
    finally:
        builtins.__import__, importlib.import_module = plain_import, by_name
    loaded = {
        name: module for name, module in _others().items() if name not in before and name not in EXECUTED
    }
    own = [name for name in loaded if name.partition(".")[0] == "ampcompare"]
    # A request may wait for the import of a module of the engine, so what uses it is executed there.
    apart = {name for name in own if name.startswith("ampcompare.apex")}
    while more := [name for name in own if name not in apart and not apart.isdisjoint(needs.get(name, []))]:
        apart.update(more)
    modules = {name: loaded.pop(name) for name in own}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent and vars(modules[parent]).get(child) is module:
            delattr(modules[parent], child)  # as if nobody had imported it
    found = [Group({name: modules[name]}, needs.get(name, [])) for name in own if name not in apart]
    return found + by_package(loaded)


def by_package(modules: dict[str, ModuleType]) -> list[Group]:
    """Return a group for each package."""
    packages = {name.partition(".")[0] for name in modules}
    return [
        Group({n: m for n, m in modules.items() if n.partition(".")[0] == one}, [])
        for one in sorted(packages)
    ]


def hide_torch() -> None:
    """Import what nearly every request needs of torch, ampcompare and others, and hide it."""
    kept = set(_others())
    groups: list[Group] = []
    for leader in LEADERS:
        before = set(_others())
        importlib.import_module(leader)
        if leader == "torch._dynamo":
            torch: Any = sys.modules["torch"]
            torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports more
        loaded = {name: module for name, module in _others().items() if name not in before}
        first = leader.partition(".")[0]
        packages = {name.partition(".")[0] for name in loaded} - {first}
        needs = sorted(packages | ({"numpy"} if first == "torch" else set()))
        own = {name: loaded.pop(name) for name in list(loaded) if name.partition(".")[0] == first}
        groups += [Group(own, needs), *by_package(loaded)]
    groups += own_groups()
    for name in set(_others()) - kept:
        del sys.modules[name]
    sys.meta_path.insert(sys.meta_path.index(PathFinder), Hidden(groups))
