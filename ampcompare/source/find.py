"""Find the Python files and notebooks below paths, in a stable order and each once, links or not."""

import fnmatch
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

SUFFIXES = (".py", ".pyi", ".pyw", ".ipynb")
# Folders that hold no source of the user; a path that names one of them is read anyway.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "__pypackages__", "node_modules", "site-packages", "build", "dist", "venv"}
)

# Files by which a virtual environment, the package of Apex and its repository are known.
FOREIGN_MARKS = ("pyvenv.cfg", "amp/_amp_state.py", "csrc/amp_C_frontend.cpp")


def find_sources(
    paths: Iterable[str | Path],
    *,
    exclude: Sequence[str] = (),
    unreadable: Callable[[Path, str], None] | None = None,
) -> Iterator[Path]:
    """Yield the files below paths, sorted within each folder, and none twice, links to files last.

    A file that is named is yielded whatever its suffix. Below folders, files with one of `SUFFIXES` are yielded; hidden
    folders, virtual environments, copies of Apex and `SKIPPED_FOLDERS` are left out. Links to folders are followed
    once. A link to a file that is found without it stands for nothing, any other is yielded under its own name.

    Args:
        paths: files and folders, which exist.
        exclude: patterns as of `fnmatch`, held against the name of a file or folder and against its path.
        unreadable: is called with a folder that cannot be read, and the reason; by default these are passed over.
    """
    seen: set[tuple[int, int]] = set()
    for path in map(Path, paths):
        if path.is_dir():
            yield from _walk_folder(path, exclude, unreadable, seen)
        elif _add_new_path(path, seen):
            yield path


def _walk_folder(
    folder: Path,
    exclude: Sequence[str],
    unreadable: Callable[[Path, str], None] | None,
    seen_inodes: set[tuple[int, int]],
) -> Iterator[Path]:
    waiting, links = [folder], list[Path]()
    while waiting:
        current = waiting.pop()
        if not _add_new_path(current, seen_inodes):
            continue
        try:
            entries = sorted(os.scandir(current), key=lambda entry: entry.name)
        except OSError as error:
            if unreadable is not None:
                unreadable(current, error.strerror or str(error))
            continue
        folders = []
        for entry in entries:
            path = current / entry.name
            if _is_excluded(path, exclude):
                continue
            if _is_folder(entry):
                if _may_hold_own_source(path):
                    folders.append(path)
            elif entry.name.endswith(SUFFIXES) and entry.is_symlink():
                links.append(path)
            elif entry.name.endswith(SUFFIXES) and _add_new_path(path, seen_inodes):
                yield path
        waiting += reversed(folders)
    yield from (path for path in links if _add_new_path(path, seen_inodes))


def _add_new_path(path: Path, seen_inodes: set[tuple[int, int]]) -> bool:
    """Return whether a file or folder was not met before, under another name either."""
    try:
        status = path.stat()
    except OSError:  # a link to nothing, or in a circle: reading it says why
        return True
    key = (status.st_dev, status.st_ino)
    if key in seen_inodes:
        return False
    seen_inodes.add(key)
    return True


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _may_hold_own_source(folder: Path) -> bool:
    name = folder.name
    if name.startswith(".") or name in SKIPPED_FOLDERS or name.endswith(".egg-info"):
        return False
    return not any(os.path.exists(folder / mark) for mark in FOREIGN_MARKS)


def _is_excluded(path: Path, patterns: Sequence[str]) -> bool:
    text = path.as_posix()
    for pattern in patterns:
        if any(
            fnmatch.fnmatch(*each) for each in ((path.name, pattern), (text, pattern), (text, f"*/{pattern}"))
        ):
            return True
        if f"/{pattern.strip('/')}/" in f"/{text}/":
            return True
    return False


def absolute_path(path: Path) -> Path:
    """Return a path from the root, with links as they are."""
    return Path(os.path.abspath(path))


def folders_up_to_repository(
    path: Path, *, marks: Sequence[str] = (".git",), end: Path | None = None
) -> list[Path]:
    """Return the folder of a file and those above it, up to that of its repository; none where it is in no repository.

    Args:
        marks: what a repository has in its own folder.
        end: a folder that counts as that of a repository, too.
    """
    above = list(absolute_path(path).parents)
    tops = (
        at for at, each in enumerate(above, 1) if each == end or any((each / mark).exists() for mark in marks)
    )
    return above[: next(tops, 0)]
