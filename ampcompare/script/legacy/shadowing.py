"""Files next to a script with the names of modules: `triton/`, `profile.py`, `random.py`, `statistics.py`.

The script must get its own files, as under plain Python, and torch must get the real modules: it imports many only when
the first optimizer is built, at a time when the folder of the script comes first on the path.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

__all__ = ["NEEDED_LATER", "forget_shadowed", "import_without_first_entry"]

NEEDED_LATER = ("torch", "torch._dynamo", "torch.utils.checkpoint", "torch.utils.data", "torch.distributed", "numpy")
# Plain Python has imported these before a script starts, or they cannot be imported twice in a process.
KEPT = frozenset(
    {
        *sys.builtin_module_names,
        "__main__",
        "_collections_abc",
        "_sitebuiltins",
        "abc",
        "amp_C",
        "ampcompare",
        "apex",
        "codecs",
        "encodings",
        "genericpath",
        "importlib",
        "io",
        "numpy",
        "os",
        "posixpath",
        "ntpath",
        "site",
        "stat",
        "torch",
        "zipimport",
    }
)


def import_without_first_entry(names: Iterable[str]) -> None:
    """Import modules without the first entry of `sys.path`, a folder of the user."""
    safe = getattr(sys.flags, "safe_path", False)
    first = [] if safe else [sys.path.pop(0)]
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        sys.path[:0] = first


def forget_shadowed(folder: str) -> None:
    """Remove modules that the script would find in its own folder, and that plain Python would not have imported yet.

    Modules that have imported them keep them.
    """
    loaded = {name.partition(".")[0] for name in sys.modules} - KEPT
    shadowed = {name for name in loaded if _is_in_folder(name, folder)}
    for name in list(sys.modules):
        if name.partition(".")[0] in shadowed:
            del sys.modules[name]


def _is_in_folder(name: str, folder: str) -> bool:
    spec = PathFinder.find_spec(name, [folder])
    # A folder without `__init__.py` gives way to any module of its name further down the path.
    if spec is None or spec.origin is None:
        return False
    loaded = getattr(sys.modules.get(name), "__file__", None)
    return loaded is None or Path(loaded).resolve() != Path(spec.origin).resolve()
