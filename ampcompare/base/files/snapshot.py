"""The files of a folder at one moment: where they lie, when they were written, and how large they are."""

import itertools
import os
from collections.abc import Iterator

from ampcompare.base.files.run_files import is_run_directory

MAX_LISTED = 10_000
TRACKERS = ("mlruns", "wandb")  # folders of experiment trackers
METADATA = (".dist-info", ".egg-info")


def mtimes_and_sizes_by_path(folder: str) -> dict[str, tuple[int, int]]:
    """Return the state of each file in a folder, of the first ten thousand, by path."""
    return {path: mtime_and_size(path) for path in itertools.islice(user_files_below(folder), MAX_LISTED)}


def mtime_and_size(path: str) -> tuple[int, int]:
    """Return when a file was written, in nanoseconds, and its size in bytes; zeros where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def user_files_below(folder: str) -> Iterator[str]:
    """Yield the files in a folder, by path, without those of tools, environments and run directories."""
    for path, folders, names in os.walk(folder):
        if is_run_directory(path) or "pyvenv.cfg" in names:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not is_name_of_tool_file(name))
        yield from filter(os.path.isfile, (os.path.join(path, name) for name in sorted(names)))


def is_name_of_tool_file(name: str) -> bool:
    """Return whether files and folders of a name are hidden, a package's metadata, or of an experiment tracker."""
    return name.startswith(".") or name.endswith(METADATA) or name in TRACKERS
