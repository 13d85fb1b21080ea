"""Which files no user names or looks for: those that a process gets from `tempfile`, and compiled modules."""

import os
import sys
import tempfile

NAMES = ("tmp", "pymp-", "torchelastic_")  # what `tempfile`, multiprocessing and torchrun begin theirs with


def temporary_root(path: str) -> str:
    """Return the temporary file or folder that a path is, or lies in; "" if it is neither.

    Args:
        path: absolute. Nothing need exist there.
    """
    folder = os.path.join(tempfile.gettempdir(), "")
    if not path.startswith(folder):
        return ""
    name = path.removeprefix(folder).partition(os.sep)[0]
    return folder + name if name.startswith(NAMES) else ""


def is_bytecode(path: str) -> bool:
    """Return whether a path is a compiled module that Python keeps, next to the source or below PYTHONPYCACHEPREFIX."""
    # it is written under a name with a number
    if not path.endswith(".pyc") and ".pyc." not in os.path.basename(path):
        return False
    prefix = sys.pycache_prefix
    is_below = bool(prefix) and os.path.realpath(path).startswith(
        os.path.join(os.path.realpath(str(prefix)), "")
    )
    return is_below or "__pycache__" in path.split(os.sep)
