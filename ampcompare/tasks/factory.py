"""Users' factories: `package.module:function`, looked for in the working directory last."""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ampcompare.base.environment.packages import importability_and_spec
from ampcompare.base.errors import AmpCompareError, ConfigError, suggestion_text

ADDED: list[str] = []  # to sys.path: the working directory of the last factory


def check_module_of_path(path: str) -> None:
    """Check that there is the module that `package.module:function` names; nothing is imported."""
    module = path.partition(":")[0]
    if not importability_and_spec(module)[0]:
        raise ConfigError(
            f"factory {path}: there is no module {module!r}; it was looked for in {os.getcwd()} and on sys.path"
        )


def resolve_factory(path: str) -> Callable[..., Any]:
    """Return the function or class that a path such as `package.module:function` names.

    Raises:
        ConfigError: the path is no `module:name`, there is no such module or name, or importing it fails.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{path!r} does not name a factory; write it as package.module:function")
    check_module_of_path(path)
    with factory_errors_reported(path, "importing its module"):
        factory: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(factory, part):
            names = [name for name in vars(factory) if not name.startswith("_")]
            raise ConfigError(f"factory {path}: there is no {part!r} in it; {suggestion_text(part, names)}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise ConfigError(
            f"factory {path} is of type {type(factory).__name__}, which cannot be called; name a function or class"
        )
    return factory  # type: ignore[no-any-return]


def select_arguments(factory: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
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
def factory_errors_reported(path: str, action: str) -> Iterator[None]:
    """Report what the user's code in the block raises as an error of the factory at `path`.

    From then on, modules are also looked for in the working directory, last: a file there never takes the place of a
    library. A model may import its neighbor in `forward`, or a data set in a worker of a DataLoader.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path[:] = [*(path for path in sys.path if path not in ADDED), folder]
        ADDED[:] = [folder]
    try:
        yield
    except AmpCompareError:
        raise
    except Exception as error:
        text = str(error).strip().replace("\n", " ") or "no text"
        raise ConfigError(f"factory {path}: {action} raised {type(error).__name__}: {text}") from error
