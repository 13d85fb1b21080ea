"""Refuse a Python or torch that is too old, in one line, before anything of either fails; imports nothing."""

import os
import sys

from ampcompare.base.version import OLDEST_PYTHON, OLDEST_TORCH, __version__

COMMANDS = ("ampcompare", "ampcompare.exe", "-m")  # what `sys.argv` begins with while a command imports the package


def require_python() -> None:
    """Raise ImportError if this Python is too old, or while a command is being started SystemExit with code 4."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        seen = ".".join(map(str, sys.version_info[:3]))
        _refuse("Python", OLDEST_PYTHON, f"this is {seen}: make an environment with a newer one")


def require_torch() -> None:
    """Do the same for the torch that an import would find, by its file `version.py`; no torch is no error."""
    version = _torch_version()
    try:
        numbers = tuple(map(int, version.split(".")[:2]))
    except ValueError:
        return
    if numbers < OLDEST_TORCH:
        _refuse("torch", OLDEST_TORCH, f"{version} is installed: pip install -U torch torchvision")


def _torch_version() -> str:
    """Return the version of torch, or "" where it is not known."""
    for finder in sys.meta_path:
        spec = getattr(finder, "find_spec", lambda *_: None)("torch", None)
        if spec is not None:
            break
    else:
        return ""
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
            line = next(line for line in file if line.startswith("__version__"))
    except (OSError, StopIteration, TypeError, UnicodeDecodeError):
        return ""
    return line.replace('"', "'").partition("'")[2].partition("'")[0]


def _refuse(name: str, oldest: tuple[int, int], seen: str) -> None:
    reason = f"ampcompare {__version__} needs {name} {oldest[0]}.{oldest[1]} or later, and {seen}"
    if os.path.basename(sys.argv[0] if sys.argv else "") in COMMANDS:  # an error here would be shown with a traceback
        sys.stderr.write(f"ampcompare: {reason}\n")
        raise SystemExit(4)
    raise ImportError(reason)
