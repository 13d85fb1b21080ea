"""Name the file of a script's folder that was imported in place of a module of its name: `profile.py`, `cuda.py`.

The folder of the script comes first on the path, so that a library which imports a module of that name gets the file.
"""

import sys
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from traceback import walk_tb
from types import ModuleType

from ampcompare.base.location import is_installed_file, is_users_or_installed_file
from ampcompare.base.python_folders import INSTALLED_PACKAGES


def find_shadowing_text(error: BaseException) -> str | None:
    """Return which file of the script's folder stands in the way of a module, if an error shows that."""
    folder = Path(sys.path[0] or ".").resolve() if sys.path else None
    if folder is None or not isinstance(error, AttributeError | ImportError):
        return None
    library, file = _find_library_and_unfinished_file_it_imported(error, folder) or (
        None,
        _find_file_lacking_name(error, folder),
    )
    if file is None:
        return None
    by = "" if library is None else f" by {library}"
    return f"{file} was imported{by} in place of a module with that name; rename the file"


def _find_library_and_unfinished_file_it_imported(
    error: BaseException, folder: Path
) -> tuple[str, str] | None:
    """Return a library and the file that it imported, which asked for what was not complete yet."""
    if "partially initialized module" not in str(error):
        return None
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    codes = [code for code in codes if not code.co_filename.startswith("<frozen ")]
    for outer, inner in pairwise(codes):
        file = inner.co_filename
        is_library = not is_users_or_installed_file(outer.co_filename) or is_installed_file(outer.co_filename)
        if (
            inner.co_name == "<module>"
            and is_library
            and (name := _find_name_below_folder(folder, file)) is not None
        ):
            return _package_name_of_file(outer.co_filename), name
    return None


def _find_file_lacking_name(error: AttributeError | ImportError, folder: Path) -> str | None:
    """Return the file that lacks a name, if there is another module with its name."""
    if isinstance(error, AttributeError):
        file = getattr(error.obj, "__file__", None) if isinstance(error.obj, ModuleType) else None
    else:
        file = error.path
    found = _find_name_below_folder(folder, file) if isinstance(file, str) else None
    if found is None:
        return None
    name = Path(found).parts[0].removesuffix(".py")
    others = [entry for entry in sys.path[1:] if Path(entry or ".").resolve() != folder]
    is_taken = name in sys.stdlib_module_names or PathFinder.find_spec(name, others) is not None
    return found if is_taken else None


def _find_name_below_folder(folder: Path, file: str) -> str | None:
    """Return a file below a folder as it is named there: a module, or the first file of a package."""
    path = Path(file).resolve()
    if not path.is_relative_to(folder) or is_installed_file(file):
        return None
    name = path.relative_to(folder)
    is_module = len(name.parts) == 1 or (len(name.parts) == 2 and name.name == "__init__.py")
    return str(name) if is_module else None


def _package_name_of_file(file: str) -> str:
    """Return the name of the installed package that a file belongs to, or of its module."""
    for root in INSTALLED_PACKAGES:
        if file.startswith(root):
            return Path(file[len(root) :]).parts[0].removesuffix(".py")
    return Path(file).stem
