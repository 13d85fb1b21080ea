"""The names of models and data sets, checked before torch is imported: what is refused here cannot work.

What files alone cannot decide passes; the process that builds the model and reads the data checks it.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from ampcompare.base.errors import BackendUnavailable, ConfigError, did_you_mean
from ampcompare.base.files.find_module import find_module
from ampcompare.settings.recipe import DataConfig, Recipe
from ampcompare.settings.task_defaults import DEFAULT_TASK
from ampcompare.tasks.catalog import (
    DATA_SETS,
    DEFAULT_DATA_DIR,
    MODEL_LIBRARIES,
    TASKS,
    TORCHVISION_FILES,
    require_files,
    task_path,
    torchvision_models,
)
from ampcompare.tasks.layout import check_layout

__all__ = ["check_data", "check_model", "check_task"]

PACKAGES = {
    "digits": ("sklearn", "scikit-learn"),
    **dict.fromkeys([*TORCHVISION_FILES, "imagefolder"], ("PIL", "pillow")),
}
ANY_NAME = re.compile(r"import \*|__getattr__|globals\(|setattr\(|exec\(|vars\(|__dict__|sys\.modules")


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
    data = recipe.data
    check_model(recipe.model.arch, recipe.task)
    if recipe.task == DEFAULT_TASK:
        check_data(data.name, data_dir=data.dir, download=data.download, look=look)
    else:
        _check_data_of(recipe.task, data.name, look=look)


def _check_data_of(task: str, name: str, *, look: bool) -> None:
    """Check that a task other than the default can have data of this name."""
    known = TASKS[task].data_sets
    kind, colon, path = name.partition(":")
    if name in known:
        return
    if colon and f"{kind}:PATH" in known:
        if look and not Path(path).is_file():
            raise ConfigError(f"--data {name}: there is no file {path!r}")
    elif colon and "module:factory" in known:
        _check_factory(name)
    else:
        raise ConfigError(f"the task {task} has no data set {name!r}; {did_you_mean(name, known)}")


def _check_settings(recipe: Recipe) -> None:
    """Check that no setting of data, labels or evaluation is given that the task ignores."""
    uses = TASKS[recipe.task].uses
    for name, field in DataConfig.model_fields.items():
        if name not in ("name", *uses) and getattr(recipe.data, name) != field.default:
            raise ConfigError(f"the task {recipe.task} does not use the setting recipe.data.{name}; leave it out")
    for name in ("label_smoothing", "tta"):
        if name not in uses and getattr(recipe, name) != Recipe.model_fields[name].default:
            raise ConfigError(f"the task {recipe.task} does not use the setting recipe.{name}; leave it out")


def check_model(arch: str, task: str = DEFAULT_TASK) -> None:
    """Check that a task can have a model of this name.

    Raises:
        ConfigError: there is none.
        BackendUnavailable: it needs a package that is not installed.
    """
    spec = TASKS[task]
    prefix, colon, name = arch.partition(":")
    if colon and prefix in MODEL_LIBRARIES:
        _check_library(prefix, name, task)
    elif colon:
        _check_factory(arch)
    elif arch not in spec.models:
        _check_torchvision_model(arch, task)


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


def _check_library(prefix: str, name: str, task: str) -> None:
    module, package, example, what = MODEL_LIBRARIES[prefix]
    if prefix not in TASKS[task].libraries:
        tasks = [other for other, spec in TASKS.items() if prefix in spec.libraries]
        raise ConfigError(
            f"--arch {prefix}:{name}: these are {what}, for --task {' or '.join(tasks)}; the task is {task}"
        )
    if not name:
        raise ConfigError(f"--arch {prefix}: names no model; write it as {example}")
    if find_spec(module) is None:
        raise BackendUnavailable(
            f"--arch {prefix}:{name} needs {package}, which is not installed: pip install {package}"
        )


def _check_torchvision_model(arch: str, task: str) -> None:
    spec = TASKS[task]
    own = [*spec.models, *(MODEL_LIBRARIES[prefix][2] for prefix in spec.libraries)]
    if spec.torchvision is None:
        raise ConfigError(f"the task {task} has no model {arch!r}; {did_you_mean(arch, own)}")
    if find_spec("torchvision") is None:
        raise BackendUnavailable(
            f"{arch} is none of {', '.join(spec.models)}, and torchvision is not installed: pip install torchvision"
        )
    known = torchvision_models()
    if known is None or known.get(arch) == spec.torchvision:
        return
    suggestion = did_you_mean(arch, [*own, *(name for name, kind in known.items() if kind == spec.torchvision)])
    if arch in known:
        raise ConfigError(f"{arch} is a torchvision model for {known[arch]}, not for {spec.torchvision}; {suggestion}")
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
