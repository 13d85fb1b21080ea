"""Which files are temporary: those that a process gets from `tempfile`, which no user names or looks for."""

import os
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
