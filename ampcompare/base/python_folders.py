"""The folders of this Python: that of its standard library, and those into which packages are installed.

Each ends with a separator and stands as Python names it and with its links resolved, so that `path.startswith` finds
either spelling.
"""

import os
import sysconfig


def _sysconfig_folders(*names: str) -> tuple[str, ...]:
    """Return the folders that `sysconfig` has under some names."""
    named = [sysconfig.get_path(name) for name in names]
    return tuple({folder + os.sep for each in named for folder in (each, os.path.realpath(each))})


STANDARD_LIBRARY = _sysconfig_folders("stdlib", "platstdlib")
INSTALLED_PACKAGES = _sysconfig_folders("purelib", "platlib")
