"""Refuse a Python that is too old, in one line, before anything of it fails; imports nothing.

An old Python reads this file, the versions and the `__init__.py` around them: their syntax is that of Python 3.6.
"""

import os
import sys

from ampcompare.base.version import OLDEST_PYTHON, __version__

# what `sys.argv` begins with while a command imports the package
COMMANDS = ("ampcompare", "ampcompare.exe", "-m")


def require_supported_python() -> None:
    """Raise ImportError if this Python is too old, or while a command is being started SystemExit with code 4."""
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return
    seen = ".".join(map(str, sys.version_info[:3]))
    oldest = ".".join(map(str, OLDEST_PYTHON))
    reason = f"ampcompare {__version__} needs Python {oldest} or later, and this is {seen}: take a newer one"
    # an error here would be shown with a traceback
    if os.path.basename(sys.argv[0] if sys.argv else "") in COMMANDS:
        sys.stderr.write(f"ampcompare: {reason}\n")
        raise SystemExit(4)
    raise ImportError(reason)
