"""Takes the working directory, which `python -m ampcompare` puts first, off the path of imports; imported first of all.

No file there, such as `json.py`, is then taken for a library. Python has found this package before, wherever it lies.
"""

import os
import sys

IS_GONE = (
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] == "ampcompare"
    and not getattr(sys.flags, "safe_path", False)
    and sys.path[:1] == [os.getcwd()]
)
"""Whether the working directory was the first entry of `sys.path`, and no longer is."""

if IS_GONE:
    del sys.path[0]
