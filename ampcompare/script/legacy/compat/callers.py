"""Distinguish the script's own calls from those of libraries, which may rely on the new behavior of torch."""

from __future__ import annotations

import sys
import sysconfig

import torch

__all__ = ["called_by_script"]

LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {torch.__path__[0].rpartition("torch")[0].rstrip("/\\")}
)


def called_by_script(depth: int = 2) -> bool:
    """Return whether a function that replaces another was called from the script's own files.

    Args:
        depth: frames from here to the caller of the replaced function.
    """
    return not sys._getframe(depth).f_code.co_filename.startswith(LIBRARIES)
