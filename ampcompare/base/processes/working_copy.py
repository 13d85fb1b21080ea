"""Working copies of folders, in which a user's code runs where the machine allows no overlay (`overlay.py`)."""

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from ampcompare.base.errors import ConfigError
from ampcompare.base.files.run_files import is_run_directory
from ampcompare.base.files.temporary import is_bytecode

MAX_FILE_BYTES = 2**30
MAX_BYTES = 2**32
MAX_FILES = 50_000
LINKED = (".git", ".hg", ".svn", "node_modules")  # no code writes there by accident


class WorkingCopies:
    """Copies of folders. Shared paths, version control, virtual environments and run directories are links in them.

    `places` says where in the store the copy of each folder lies; one that lies in another is part of its copy.

    Raises:
        ConfigError: a file, or all files together, are too large.
    """

    def __init__(self, store: str, folders: Sequence[str], shared: Collection[str]) -> None:
        self.places: dict[str, str] = {}
        self._copied: dict[str, tuple[int, int, int]] = {}
        self._shared = {*shared, store}
        self._bytes = 0
        for folder in sorted(set(folders)):
            if self.path_of_copy(folder) is None:
                place = os.path.join(store, str(len(self.places)))
                self.places[folder] = place
                self._copy_folder(folder, place)

    def path_of_copy(self, path: str) -> str | None:
        """Return where the copy of a path lies; None if it has none."""
        for folder, place in self.places.items():
            if path == folder or path.startswith(os.path.join(folder, "")):
                return os.path.join(place, os.path.relpath(path, folder)) if path != folder else place
        return None

    def written_files(self) -> Iterator[tuple[str, str, Literal["new", "changed", "removed"]]]:
        """Yield each file that is not as it was copied: its path, where its copy lies, and what was done."""
        seen = set()
        for folder, place in self.places.items():
            for path, folders, names in os.walk(place):
                folders[:] = [name for name in folders if name != "__pycache__"]
                links = [name for name in folders if os.path.islink(os.path.join(path, name))]
                for copy in (os.path.join(path, name) for name in [*names, *links]):
                    seen.add(copy)
                    known = self._copied.get(copy)
                    original = os.path.join(folder, os.path.relpath(copy, place))
                    if known != _size_mtime_and_mode(copy) and not is_bytecode(original):
                        yield original, copy, "changed" if known or os.path.lexists(original) else "new"
            for copy in self._copied.keys() - seen:
                if copy.startswith(os.path.join(place, "")):
                    yield os.path.join(folder, os.path.relpath(copy, place)), copy, "removed"

    def _copy_folder(self, folder: str, place: str) -> None:
        os.mkdir(place)
        with os.scandir(folder) as found:
            entries = list(found)
        for entry in entries:
            target = os.path.join(place, entry.name)
            if entry.is_dir(follow_symlinks=False) and not self._is_kept_as_link(entry.path):
                if entry.name != "__pycache__":
                    self._copy_folder(entry.path, target)
                continue
            if entry.is_symlink():
                os.symlink(self._target_of_copied_link(entry.path), target)
            elif entry.is_dir() or entry.path in self._shared:
                os.symlink(entry.path, target)
            elif entry.is_file():
                self._check_size(entry.path, entry.stat().st_size)
                shutil.copy2(entry.path, target)
            else:  # a pipe or a socket
                continue
            self._copied[target] = _size_mtime_and_mode(target)

    def _target_of_copied_link(self, path: str) -> str:
        """Return where the copy of a link leads to: to what it names, or to the real one outside of all copies."""
        text = os.readlink(path)
        there = os.path.normpath(os.path.join(os.path.dirname(path), text))
        return there if self.path_of_copy(there) is None else text

    def _is_kept_as_link(self, path: str) -> bool:
        is_environment = os.path.exists(os.path.join(path, "pyvenv.cfg"))
        return (
            path in self._shared
            or os.path.basename(path) in LINKED
            or is_environment
            or is_run_directory(path)
        )

    def _check_size(self, path: str, size: int) -> None:
        self._bytes += size
        if size <= MAX_FILE_BYTES and self._bytes <= MAX_BYTES and len(self._copied) < MAX_FILES:
            return
        what = f"{path} ({size / 2**30:.1f} GiB) is"
        if size <= MAX_FILE_BYTES:
            what = f"the files next to {path}, more than {MAX_FILES} or {MAX_BYTES / 2**30:.0f} GiB, are"
        raise ConfigError(
            f"{what} too large to protect: this machine allows no overlays, so that your code runs in a copy of its "
            f"folder. Allow it to change the real ones, --allow-writes {os.path.dirname(path)}, with results in "
            "{cell_dir}; or keep data elsewhere"
        )


def _size_mtime_and_mode(path: str) -> tuple[int, int, int]:
    facts = os.lstat(path)
    return facts.st_size, facts.st_mtime_ns, facts.st_mode
