"""Find the code to run, and set `sys.path` and `sys.argv` as `python SCRIPT` and `python -m MODULE` do.

Files next to a script may have the names of modules: `triton/`, `profile.py`, `random.py`, `statistics.py`. The script
must get its own, as under plain Python, and torch must get the real modules: it imports many only when the first
optimizer is built, at a time when the folder of the script comes first on the path.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ampcompare.base.environment.packages import is_in_site_folder
from ampcompare.base.errors import ConfigError

NEEDED_LATER = (
    "torch",
    "torch._dynamo",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch.distributed",
    "numpy",
)
# Plain Python has imported these before a script starts, or they cannot be imported twice in a process.
KEPT = frozenset(
    (
        *(
            *sys.builtin_module_names,
            "__main__",
            "_collections_abc",
            "_sitebuiltins",
            "abc",
            "amp_C",
            "ampcompare",
        ),
        *("apex", "codecs", "encodings", "genericpath"),
        *("importlib", "io", "numpy", "os", "posixpath", "ntpath"),
        *("site", "stat", "torch", "zipimport"),
    )
)

CALLS_APEX = re.compile(
    rb"^[ \t]*(?:from|import)[ \t]+(?:apex|amp_C|apex_C)\b|\bamp\.scale_loss\(", re.MULTILINE
)


def loaded_apex_files_in_folder(script: str) -> list[str]:
    """Return a script and the modules next to it that this process has imported, from its folder, if they use Apex."""
    folder = Path(script).resolve().parent
    found = [each for each in _loaded_user_files_using_apex(script) if each.is_relative_to(folder)]
    return [str(each.relative_to(folder)) for each in found]


def digests_of_apex_files_elsewhere(script: str) -> list[str]:
    """Return the SHA-256 of each module from elsewhere that this process has imported, if it uses Apex."""
    folder = Path(script).resolve().parent
    others = [each for each in _loaded_user_files_using_apex(script) if not each.is_relative_to(folder)]
    return sorted(hashlib.sha256(each.read_bytes()).hexdigest() for each in others)


def _loaded_user_files_using_apex(script: str) -> list[Path]:
    """Return a script and the modules that this process has imported, without installed ones, if they use Apex."""
    files = (file for each in list(sys.modules.values()) if (file := _find_source_file(each)))
    loaded = dict.fromkeys(Path(each).resolve() for each in (script, *files))
    return [
        each
        for each in loaded
        if each.is_file() and not is_in_site_folder(str(each)) and CALLS_APEX.search(each.read_bytes())
    ]


def _find_source_file(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") and module.__name__ != "__main__" else None


def import_without_script_folder(names: Iterable[str]) -> None:
    """Import modules without the first entry of `sys.path`, a folder of the user."""
    first = [] if sys.flags.safe_path else [sys.path.pop(0)]
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        sys.path[:0] = first


@contextlib.contextmanager
def search_script_folder_last() -> Iterator[None]:
    """Look into the first entry of `sys.path`, a folder of the user, behind all others in a block."""
    if sys.flags.safe_path:
        yield
        return
    folder = sys.path.pop(0)
    sys.path.append(folder)
    try:
        yield
    finally:
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]
        sys.path.insert(0, folder)


def forget_shadowed_modules() -> None:
    """Let the script find the files of its folder, also those with names of modules that this process has loaded."""
    if not sys.flags.safe_path:
        _forget_modules_shadowed_by_folder(sys.path[0])


def _forget_modules_shadowed_by_folder(folder: str) -> None:
    """Remove modules that the script finds in its own folder, and that plain Python would not have imported yet.

    Modules that have imported them keep them.
    """
    loaded = {name.partition(".")[0] for name in sys.modules} - KEPT
    shadowed = {name for name in loaded if _is_module_shadowed_by_folder(name, folder)}
    for name in list(sys.modules):
        if name.partition(".")[0] in shadowed:
            del sys.modules[name]


def _is_module_shadowed_by_folder(name: str, folder: str) -> bool:
    spec = PathFinder.find_spec(name, [folder])
    # A folder without `__init__.py` gives way to any module of its name further down the path.
    if spec is None or spec.origin is None:
        return False
    loaded = getattr(sys.modules.get(name), "__file__", None)
    return loaded is None or Path(loaded).resolve() != Path(spec.origin).resolve()


class Target:
    """A script, or a module.

    Args:
        name: the path of the script, or the dotted name of the module.
        arguments: those behind its name, as its `sys.argv` gets them.
        is_module: whether it is run as by `python -m`.
    """

    def __init__(self, name: str, arguments: list[str], *, is_module: bool) -> None:
        self.name = name
        self.arguments = arguments
        self.is_module = is_module

    def set_sys_path_and_argv(self) -> None:
        """Set the first entry of `sys.path`, and `sys.argv`, as the interpreter does."""
        sys.argv[:] = ["-m" if self.is_module else self.name, *self.arguments]
        if not sys.flags.safe_path:  # under -P the interpreter has added no entry
            sys.path[0] = str(Path.cwd() if self.is_module else Path(self.name).resolve().parent)

    def load_code_and_main(self) -> tuple[CodeType, ModuleType]:
        """Return the code to run and the new `__main__` to run it in.

        Raises:
            ConfigError: there is no such script or module, or it is not Python that can be run.
        """
        if not self.is_module:
            return _load_code_and_main_of_script(self.name)
        spec = self._find_module_to_run()
        if not hasattr(spec.loader, "get_code"):
            raise ConfigError(f"{spec.name} is not Python code that can be run")
        code: CodeType | None = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        if code is None:
            raise ConfigError(f"{spec.name} has no Python code; it cannot be run")
        sys.argv[0] = spec.origin or self.name
        return code, _make_main_module(
            __file__=spec.origin,
            __cached__=spec.cached,
            __loader__=spec.loader,
            __package__=spec.parent,
            __spec__=spec,
        )

    def _find_module_to_run(self) -> ModuleSpec:
        name = self.name
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                name = f"{name}.__main__"
                spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # an import inside a parent package
            spec = None
        except ValueError:  # a relative name, or a module without a spec
            spec = None
        if spec is None:
            raise ConfigError(f"there is no module {name} to run; check its name and PYTHONPATH")
        return spec


def target_of(name: str, arguments: list[str], *, is_module: bool) -> Target:
    """Return the target for a module, as with `python -m`, or for a script.

    Args:
        name: the dotted name of the module, or the path of the script.
        arguments: those behind its name.
        is_module: which of the two it is.

    Raises:
        ConfigError: the script is missing, cannot be read, or is no source file of Python.
    """
    if is_module:
        return Target(name, arguments, is_module=True)
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"there is no script {name}; give its path, or -m and the name of a module")
    if path.is_dir() or path.suffix in (".pyc", ".pyz", ".zip"):
        raise ConfigError(
            f"{name} is no source file of Python; name the script inside it, or give -m and a module"
        )
    if not os.access(path, os.R_OK):
        raise ConfigError(f"the script {name} cannot be read; check its permissions")
    return Target(name, arguments, is_module=False)


def _load_code_and_main_of_script(name: str) -> tuple[CodeType, ModuleType]:
    path = os.path.abspath(name)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    return code, _make_main_module(__file__=path, __loader__=SourceFileLoader("__main__", path))


def _make_main_module(**attributes: Any) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(
        {"__annotations__": {}, "__builtins__": sys.modules["builtins"], "__cached__": None, **attributes}
    )
    return module
