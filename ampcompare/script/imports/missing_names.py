"""Record the names of `apex` that a script asks for and does not get: modules, and attributes of modules.

Scripts often catch the error and silently take a slower or less exact path.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ampcompare.apex._install import HOME, KERNELS, ApexFinder, real_module_name
from ampcompare.base.location import is_users_or_installed_file


def record_missing_apex_names(finder: ApexFinder) -> None:
    """Add to `finder.missing` each attribute of `apex` modules that the script asks for and does not get."""
    for name, module in list(sys.modules.items()):
        if _is_name_of_engine(name):
            _record_missing_names_of(module, finder.missing)
    find_spec = finder.find_spec

    @functools.wraps(find_spec)
    def find_watched_spec(fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None and _is_name_of_engine(fullname):
            _record_missing_names_once_loaded(spec.loader, finder.missing)
        return spec

    finder.find_spec = find_watched_spec  # type: ignore[method-assign]


def missing_names_of_script(finder: ApexFinder, error: BaseException | None) -> list[str]:
    """Return what the script asked for and did not get, under its own names; also by the error that has ended it."""
    names = list(finder.missing)
    while error is not None:
        name = _find_name_in_error(error)
        if name is not None and name not in names:
            names.append(name)
        error = error.__cause__ or error.__context__
    return names


def _find_name_in_error(error: BaseException) -> str | None:
    """Return what an ImportError did not find in `apex`, under the name that the script used."""
    if not isinstance(error, ImportError) or error.name is None:
        return None
    if _is_name_of_engine(error.name):
        module = "apex" + error.name[len(HOME) :]
        name = (
            getattr(error, "name_from", None)
            or str(error).partition("cannot import name '")[2].partition("'")[0]
        )
        return f"{module}.{name}" if name else module
    return error.name if real_module_name(error.name) or error.name in KERNELS else None


def _is_name_of_engine(name: str) -> bool:
    return name == HOME or name.startswith(f"{HOME}.")


def _record_missing_names_once_loaded(loader: Any, missing_names: list[str]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _record_missing_names_of(module, missing_names)

    loader.exec_module = exec_module


def _record_missing_names_of(module: ModuleType, missing_names: list[str]) -> None:
    """Add a `__getattr__` that records names that the script asks for, and otherwise answers as before."""
    before: Callable[[str], Any] | None = module.__dict__.get("__getattr__")
    alias = _script_name_of_engine_module(module.__name__)

    def lookup(name: str) -> Any:
        try:
            if before is not None:
                return before(name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        except AttributeError:
            full = f"{alias}.{name}"
            # `from x import name` looks up from the frame of the script; the import system has looked up before that.
            if (
                not name.startswith("__")
                and full not in missing_names
                and is_users_or_installed_file(sys._getframe(1).f_code.co_filename)
            ):
                missing_names.append(full)
            raise

    module.__dict__["__getattr__"] = lookup


def _script_name_of_engine_module(name: str) -> str:
    return "amp_C" if name == f"{HOME}.amp_C" else "apex" + name[len(HOME) :]
