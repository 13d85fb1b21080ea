"""Resolve `apex` where the environment's own lacks `apex.amp`, or where there is none.

Next to NVIDIA's Apex without amp, the submodules that it lacks are the engine's, for everybody: its kernels and
`contrib` stay. Where there is no Apex, the user's own code gets the engine, and libraries get what they would get
without this: nothing. So modules under the name `apex` do not stay in `sys.modules`, where a library's probe would
see them: they are taken out in the last moment of an import at which Python code runs.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ampcompare.base.environment.apex import ApexInstall, find_installed_apex
from ampcompare.base.shim.alias import ENGINE, AliasLoader
from ampcompare.base.shim.importer import calling_frame, importer_asking_for_apex

# What NVIDIA removed in May 2025, of which the engine has all that scripts import.
REMOVED = ("amp", "fp16_utils", "parallel")
IMPORT_SYSTEM = "<frozen importlib._bootstrap"
EXTENSIONS = ("amp_C", "apex_C", "fused_layer_norm_cuda")


def missing_submodules(package: Path) -> tuple[str, ...]:
    """Return the submodules of `REMOVED` that an installed Apex lacks."""
    return tuple(name for name in REMOVED if not os.path.isfile(package / name / "__init__.py"))


class ShimFinder(MetaPathFinder):
    """Resolve what is missing under the name `apex`, and its compiled modules, to the engine.

    Attributes:
        answered: libraries whose imports are answered too where there is no Apex.
    """

    def __init__(self, answered: Iterable[str] = ()) -> None:
        self.answered = frozenset(answered)
        self._path: list[str] | None = None
        self._found: ApexInstall | None = None
        self._loading = 0
        self._holds = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec of a module of the engine; None leaves the name to the other finders."""
        if fullname != "apex" and not fullname.startswith("apex.") and fullname not in EXTENSIONS:
            self.unload_engine_modules()
            return None
        importer = importer_asking_for_apex(calling_frame(), self.answered)
        found = self._find_installed_apex()
        if fullname in EXTENSIONS:
            usable = found.kind in ("absent", "namespace", "no_amp")
            if importer != "own" or not usable or self._spec_of_other_finders(fullname, path) is not None:
                return None
            self._holds = found.kind != "no_amp"
            return self._engine_spec(fullname, f"{ENGINE}.{fullname}", (), forgets=self._holds)
        if found.kind == "no_amp" and found.path is not None:
            missing = missing_submodules(found.path)
            if fullname == "apex":
                return self._spec_grafting_submodules(path, missing)
            answers = fullname.split(".")[1] in missing and importer != "probe"
            under = [f"apex.{name}" for name in missing]
            return self._engine_spec(fullname, ENGINE + fullname[len("apex") :], under) if answers else None
        if found.kind in ("absent", "namespace") and importer == "own":
            self._holds = True
            spec = self._engine_spec(fullname, ENGINE + fullname[len("apex") :], (), forgets=True)
            if spec is None:
                self.unload_engine_modules()
            return spec
        return None

    def unload_engine_modules(self) -> None:
        """Take modules out of `sys.modules` that only the user's own code is to see; references to them stay valid."""
        if self._loading or not self._holds:
            return
        self._holds = False
        for name in list(sys.modules):
            is_of_apex = name in EXTENSIONS or name == "apex" or name.startswith("apex.")
            if is_of_apex and getattr(sys.modules[name], "__name__", "").startswith(ENGINE):
                del sys.modules[name]

    def _find_installed_apex(self) -> ApexInstall:
        if self._found is None or self._path != sys.path:
            self._path, self._found = list(sys.path), find_installed_apex()
        return self._found

    def _spec_of_other_finders(self, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """Return what the other finders find."""
        for finder in list(sys.meta_path):
            if finder is not self and (spec := finder.find_spec(fullname, path, None)) is not None:
                return spec
        return None

    def _engine_spec(
        self, fullname: str, real: str, under: Sequence[str], *, forgets: bool = False
    ) -> ModuleSpec | None:
        self._loading += 1
        try:
            real_spec = importlib.util.find_spec(real)
        except ImportError:  # no torch, or one that is too old
            return None
        finally:
            self._loading -= 1
        if real_spec is None:
            return None
        is_package = real_spec.submodule_search_locations is not None
        loader = _LoaderPausingForgetting(AliasLoader(real, under), self, forgets)
        if forgets:
            return _ForgottenSpec(self, fullname, loader, is_package=is_package)
        return ModuleSpec(fullname, loader, is_package=is_package)

    def _spec_grafting_submodules(
        self, path: Sequence[str] | None, missing: tuple[str, ...]
    ) -> ModuleSpec | None:
        """Return the spec of NVIDIA's package, which once loaded has the missing submodules as attributes."""
        spec = self._spec_of_other_finders("apex", path)
        loader: Any = None if spec is None else spec.loader
        if loader is not None and hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                graft_submodules(module, missing)

            loader.exec_module = exec_module
        return spec


class _LoaderPausingForgetting(Loader):
    """Loads a module of the engine; meanwhile nothing is forgotten."""

    def __init__(self, inner: Loader, finder: ShimFinder, forgets: bool) -> None:
        self._inner = inner
        self._finder = finder
        self._forgets = forgets

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._count_during_call(self._inner.create_module, spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._count_during_call(self._inner.exec_module, module)
        if self._forgets and type(module) is ModuleType:
            module.__class__ = _ForgottenModule
            module.__dict__["_shim"] = self._finder

    def _count_during_call(self, call: Callable[..., Any], argument: Any) -> Any:
        self._finder._loading += 1
        try:
            return call(argument)
        finally:
            self._finder._loading -= 1


class _ForgottenSpec(ModuleSpec):
    """The spec of `apex` or a compiled module, which is forgotten when the import system calls it initialized."""

    def __init__(self, finder: ShimFinder, name: str, loader: Loader, *, is_package: bool) -> None:
        self._finder = finder
        self._is_loading = False
        super().__init__(name, loader, is_package=is_package)

    @property
    def _initializing(self) -> bool:
        return self._is_loading

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        ends = self._is_loading and not value
        self._is_loading = value
        if ends and "." not in self.name and not _is_import_for_submodule():
            self._finder.unload_engine_modules()


class _ForgottenModule(ModuleType):
    """A module of the engine that is forgotten when the import of a submodule ends: by setting it as an attribute."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not sys._getframe(1).f_code.co_filename.startswith(IMPORT_SYSTEM):
            super().__setattr__(name, value)
            return
        # `apex.amp._amp_state` is the state object, which has the name of a submodule.
        if isinstance(self.__dict__.get(name, value), ModuleType):
            super().__setattr__(name, value)
        if isinstance(value, ModuleType) and not _is_import_for_submodule():
            self.__dict__["_shim"].unload_engine_modules()


def _is_import_for_submodule() -> bool:
    """Return whether the import that ends is that of a package for one of its submodules, which needs it."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(IMPORT_SYSTEM):
        if frame.f_code.co_name == "_call_with_frames_removed":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def graft_submodules(module: ModuleType, missing_names: tuple[str, ...]) -> None:
    """Give an imported Apex attributes that import the submodules which it lacks."""
    before: Callable[[str], Any] | None = module.__dict__.get("__getattr__")

    def import_submodule(name: str) -> Any:
        if name in missing_names:
            return importlib.import_module(f"apex.{name}")
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__dict__["__getattr__"] = import_submodule
    if isinstance(listed := module.__dict__.get("__all__"), list):
        module.__dict__["__all__"] = [*listed, *(name for name in missing_names if name not in listed)]


def install(answered_libraries: Iterable[str] = ()) -> ShimFinder:
    """Resolve what of Apex is missing to the engine, in this process; a second call changes nothing.

    Args:
        answered_libraries: libraries that are answered as the user's own code is where there is no Apex.
    """
    # Files that `shim on` has written into environments call it by this name.
    for finder in sys.meta_path:
        if isinstance(finder, ShimFinder):
            return finder
    finder = ShimFinder(answered_libraries)
    sys.meta_path.insert(0, finder)
    loaded, found = sys.modules.get("apex"), find_installed_apex()
    if loaded is not None and found.kind == "no_amp" and found.path is not None:
        graft_submodules(loaded, missing_submodules(found.path))
    return finder
