"""Users' factories: `package.module:function`, looked for in the working directory last."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ampcompare.base.errors import AmpCompareError, ConfigError, did_you_mean
from ampcompare.tasks.neighbors import install_finder

__all__ = ["blamed", "named_by", "resolve_factory"]


def resolve_factory(path: str) -> Callable[..., Any]:
    """Import what `package.module:function` names.

    Raises:
        ConfigError: the text, the module or the function is wrong, or importing the module raises.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{path!r} does not name a factory; write it as package.module:function")
    importlib.invalidate_caches()
    with blamed(path, "importing its module"):
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(
                f"factory {path}: there is no module {error.name!r}; it was looked for in {os.getcwd()} and on sys.path"
            ) from error
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
