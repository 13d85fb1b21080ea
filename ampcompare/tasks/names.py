"""The names of models and data sets, checked before torch is imported: what is refused here cannot work.

What files alone cannot decide passes; the process that builds the model and reads the data checks it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from ampcompare.errors import BackendUnavailable, ConfigError, did_you_mean
from ampcompare.settings.recipe import DataConfig, Recipe
from ampcompare.settings.task_defaults import DEFAULT_TASK
from ampcompare.tasks.catalog import (
    BUILTIN_MODELS,
    DATA_SETS,
    DEFAULT_DATA_DIR,
    TASKS,
    TORCHVISION_FILES,
    require_files,
    task_path,
    torchvision_models,
)
from ampcompare.tasks.layout import check_layout

__all__ = ["check_data", "check_model", "check_task", "find_module"]

PACKAGES = {
    "digits": ("sklearn", "scikit-learn"),
    **dict.fromkeys([*TORCHVISION_FILES, "imagefolder"], ("PIL", "pillow")),
}
ANY_NAME = re.compile(r"import \*|__getattr__|globals\(|setattr\(|exec\(|vars\(|__dict__|sys\.modules")
ANY_MODULE = re.compile(r"__path__|sys\.modules|meta_path")


def check_task(recipe: Recipe, *, look: bool = True) -> None:
    """Check that task, model and data of a recipe can exist, and that the task uses the settings that are given.

    Args:
        look: whether files of the data must be on this machine.

    Raises:
        ConfigError: there is no such task, model or data set, or its files are missing.
        BackendUnavailable: a package that one of them needs is not installed.
    """
    path, ships = task_path(recipe.task)
    if not ships:
        _check_factory(path)
        return
    _check_settings(recipe)
    arch, data = recipe.model.arch, recipe.data
    if recipe.task == DEFAULT_TASK:
        check_model(arch)
        check_data(data.name, data_dir=data.dir, download=data.download, look=look)
        return
    spec = TASKS[recipe.task]
    for kind, name, known in (("model", arch, spec.models), ("data set", data.name, spec.data_sets)):
        if name in known:
            continue
        if kind == "model" and ":" in name:
            _check_factory(name)
            continue
        raise ConfigError(f"the task {recipe.task} has no {kind} {name!r}; {did_you_mean(name, known)}")


def _check_settings(recipe: Recipe) -> None:
    """Check that no setting of data, labels or evaluation is given that the task ignores."""
    uses = TASKS[recipe.task].uses
    for name, field in DataConfig.model_fields.items():
        if name not in ("name", *uses) and getattr(recipe.data, name) != field.default:
            raise ConfigError(f"the task {recipe.task} does not use the setting recipe.data.{name}; leave it out")
    for name in ("label_smoothing", "tta"):
        if name not in uses and getattr(recipe, name) != Recipe.model_fields[name].default:
            raise ConfigError(f"the task {recipe.task} does not use the setting recipe.{name}; leave it out")


def check_model(arch: str) -> None:
    """Check that a model of this name can exist.

    Raises:
        ConfigError: there is none.
        BackendUnavailable: it needs torchvision, which is not installed.
    """
    if ":" in arch:
        _check_factory(arch)
    elif arch not in BUILTIN_MODELS:
        _check_torchvision_model(arch)


def check_data(name: str, *, data_dir: str | None, download: bool, look: bool = True) -> None:
    """Check that a data set of this name can exist, and that its files do.

    Args:
        look: whether the files must be on this machine.

    Raises:
        ConfigError: there is none, or its files are missing.
        BackendUnavailable: a package that it needs is not installed.
    """
    kind, colon, path = name.partition(":")
    if kind == "imagefolder" or not colon:
        if name not in DATA_SETS and kind != "imagefolder":
            raise ConfigError(f"there is no data set {name!r}; {did_you_mean(name, DATA_SETS)}")
        module, package = PACKAGES.get(kind, ("", ""))
        if module and find_spec(module) is None:
            raise BackendUnavailable(f"--data {name} needs {package}, which is not installed: pip install {package}")
        if kind == "imagefolder" and look:
            check_layout(path or data_dir or "")
        elif name in TORCHVISION_FILES and look and not download:
            require_files(name, Path(data_dir or DEFAULT_DATA_DIR))
        return
    _check_factory(name)


def _check_torchvision_model(arch: str) -> None:
    if find_spec("torchvision") is None:
        raise BackendUnavailable(
            f"{arch} is none of {', '.join(BUILTIN_MODELS)}, and torchvision is not installed: pip install torchvision"
        )
    known = torchvision_models()
    if known is None or known.get(arch):
        return
    suggestion = did_you_mean(arch, [*BUILTIN_MODELS, *(name for name, classifies in known.items() if classifies)])
    if arch in known:
        raise ConfigError(f"{arch} is a torchvision model that does not classify images; {suggestion}")
    raise ConfigError(f"there is no model {arch!r}; {suggestion}")


def _check_factory(path: str) -> None:
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{path!r} does not name a factory; write it as package.module:function")
    if module in sys.modules:
        return
    may_exist, spec = find_module(module)
    if not may_exist:
        raise ConfigError(
            f"factory {path}: there is no module {module!r}; it was looked for in {os.getcwd()} and on sys.path"
        )
    if spec is not None and spec.origin is not None and spec.submodule_search_locations is None:
        _check_attribute(path, attribute.partition(".")[0], Path(spec.origin))


def _check_attribute(path: str, name: str, file: Path) -> None:
    """Check that a module can have an attribute: its source mentions the name, or defines names dynamically."""
    try:
        source = file.read_text(encoding="utf-8")
        if file.suffix != ".py" or ANY_NAME.search(source) or re.search(rf"\b{re.escape(name)}\b", source):
            return
        body = ast.parse(source).body
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    names = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    raise ConfigError(f"factory {path}: there is no {name!r} in it; {did_you_mean(name, names)}")


def find_module(name: str) -> tuple[bool, ModuleSpec | None]:
    """Return whether a module may be importable, with the current directory on the path, and what would be loaded.

    Nothing is imported, not even the packages around it; a package that changes its own path may have any module.
    """
    importlib.invalidate_caches()
    top, *rest = name.split(".")
    if not all(part.isidentifier() for part in (top, *rest)):
        return False, None
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    except ValueError:  # loaded, from an unknown location
        return True, None
    for part in rest:
        if spec is None:
            return False, None
        inner = PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
        if inner is None:
            return _may_hold_any_module(spec), None
        spec = inner
    return spec is not None, spec


def _may_hold_any_module(spec: ModuleSpec) -> bool:
    """Return whether a module may create submodules that are not files in its folder, as `os` creates `os.path`."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return spec.submodule_search_locations is None
    try:
        return bool(ANY_MODULE.search(Path(spec.origin).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return True
