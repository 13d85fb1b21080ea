"""Users' factories: `package.module:function`, looked for in the working directory last.

A user's model may import its neighbor in `forward`, or a data set in a worker of a DataLoader, which is forked: a
finder serves those imports after the factory was resolved.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

from ampcompare.base.environment.packages import find_module
from ampcompare.base.errors import AmpCompareError, ConfigError, did_you_mean

__all__ = ["NeighborFinder", "blamed", "check_module", "install_finder", "named_by", "resolve_factory"]


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


def check_module(path: str) -> None:
    """Check that there is the module that `package.module:function` names; nothing is imported.

    Raises:
        ConfigError: there is none.
    """
    module = path.partition(":")[0]
    if not find_module(module)[0]:
        raise ConfigError(
            f"factory {path}: there is no module {module!r}; it was looked for in {os.getcwd()} and on sys.path"
        )


def resolve_factory(path: str) -> Callable[..., Any]:
    """Import what `package.module:function` names.

    Raises:
        ConfigError: the text, the module or the function is wrong, or importing the module raises.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{path!r} does not name a factory; write it as package.module:function")
    check_module(path)
    with blamed(path, "importing its module"):
        found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(found) if not name.startswith("_")]
            raise ConfigError(f"factory {path}: there is no {part!r} in it; {did_you_mean(part, names)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"factory {path} is of type {type(found).__name__}, which cannot be called; name a function or class"
        )
    return found  # type: ignore[no-any-return]


def named_by(factory: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `offered` that the factory names as parameters; all of them if it takes `**kwargs`."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # compiled callables may have no signature
        return {}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in keywords}
    return {name: value for name, value in offered.items() if name in names}


@contextlib.contextmanager
def blamed(path: str, action: str) -> Iterator[None]:
    """Report what the user's code in the block raises as an error of the factory at `path`.

    In the block, modules are also looked for in the working directory, last: a file there with the name of a library
    is never imported in its place. After the block, only modules of that directory find each other there.

    Raises:
        ConfigError: the block raised; the cause is chained.
    """
    folder = os.getcwd()
    added = folder not in sys.path
    if added:
        sys.path.append(folder)
        install_finder(folder)
    try:
        yield
    except AmpCompareError:
        raise
    except Exception as error:
        raise _failed(path, action, error) from error
    finally:
        if added:
            with contextlib.suppress(ValueError):  # the user's code may have removed it
                sys.path.remove(folder)


def _failed(path: str, action: str, error: Exception) -> ConfigError:
    text = str(error).strip().replace("\n", " ") or "no text"
    return ConfigError(f"factory {path}: {action} raised {type(error).__name__}: {text}")
