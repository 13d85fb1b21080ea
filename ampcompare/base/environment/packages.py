"""The packages of this environment: versions, entry points, whether a module can be imported, and quiet imports."""

import functools
import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LATE_PACKAGES = ("numpy", "torchvision")  # torch or ampcompare may have loaded them before a script does
ANY_MODULE = re.compile(r"__path__|sys\.modules|meta_path")
SITE_FOLDERS = ("site-packages", "dist-packages")  # into which packages are installed, the latter by Debian


def is_in_site_folder(path: str) -> bool:
    """Return whether a file lies in a folder into which packages are installed, of any environment.

    Args:
        path: of the file.
    """
    return any(f"{os.sep}{folder}{os.sep}" in path for folder in SITE_FOLDERS)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None; read again where a folder of `sys.path` has changed."""
    return _read_version(distribution, _folders_of_search_path_with_dates())


@functools.lru_cache
def _read_version(distribution: str, _path: tuple[Any, ...]) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def entry_points(group: str) -> list[metadata.EntryPoint]:
    """Return the entry points of a group; metadata is read again only where a folder of `sys.path` has changed."""
    return list(_entry_points_of_group(_folders_of_search_path_with_dates(), group))


@functools.lru_cache(maxsize=16)
def _entry_points_of_group(path: tuple[Any, ...], group: str) -> list[metadata.EntryPoint]:
    """Return the entry points of a group, which are few among hundreds, and asked for with each precision."""
    return list(_read_entry_points_of_all_groups(path).select(group=group))


@functools.lru_cache(maxsize=1)
def _read_entry_points_of_all_groups(_path: tuple[Any, ...]) -> Any:
    return metadata.entry_points()


def _folders_of_search_path_with_dates() -> tuple[tuple[str, int, int], ...]:
    """Return the folders of `sys.path`, each with what changes where packages are installed into it."""
    states = []
    for folder in sys.path:
        with suppress(OSError):
            found = os.stat(folder or ".")
            states.append((folder, found.st_ino, found.st_mtime_ns))
    return tuple(states)


def distributions_imported_since(modules: Collection[str]) -> list[tuple[str, str]]:
    """Return the distributions, with their versions, that this process has imported since it had some modules."""
    before = {name.partition(".")[0] for name in modules} - set(LATE_PACKAGES)
    tops = {
        name.partition(".")[0]
        for name, module in list(sys.modules.items())
        if isinstance(file := getattr(module, "__file__", None), str) and is_in_site_folder(file)
    } - before
    late = tops.intersection(LATE_PACKAGES)  # whose distributions have their names
    others = distributions_of_modules(tops - late) if tops - late else set()
    names = [
        *sorted(late),
        *sorted(
            name
            for name in others
            if _plain_distribution_name(name) not in _distributions_needed_anyway() | late
        ),
    ]
    return [(name, version) for name in names if (version := installed_version(name)) is not None]


def distributions_of_modules(tops: Iterable[str]) -> set[str]:
    """Return the names of the distributions that installed a module or package of one of these names.

    `metadata.packages_distributions` says the same of all names, and makes a path of each installed file for it: 0.6 s
    with 70 distributions, at the end of each cell.
    """
    wanted, found = set(tops), set()
    names = "|".join(map(re.escape, sorted(wanted)))
    listed = re.compile(rf'^"?(?:{names})(?:/[^\n]*|\.[\w-]+)?\.(?:py|so|pyd)"?,', re.MULTILINE)
    for distribution in metadata.distributions():
        declared = distribution.read_text("top_level.txt")
        if declared:
            brings = not wanted.isdisjoint(declared.split())
        elif record := distribution.read_text("RECORD"):
            brings = listed.search(record) is not None
        else:  # no wheel
            files = distribution.files or ()
            brings = any(file.suffix == ".py" and file.with_suffix("").parts[0] in wanted for file in files)
        if brings:
            found.add(distribution.metadata["Name"])
    return found


def _distributions_needed_anyway() -> set[str]:
    """Return the distributions that torch and ampcompare load for themselves, by their plain names."""
    needed: set[str] = set()
    for name in ("torch", "ampcompare"):
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        always = [text for text in requirements if "extra ==" not in text]
        needed |= {
            _plain_distribution_name(found[0]) for text in always if (found := re.match(r"[\w.-]+", text))
        }
    return needed - set(LATE_PACKAGES)


def _plain_distribution_name(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def importability_and_spec(name: str) -> tuple[bool, ModuleSpec | None]:
    """Return whether a module may be importable, with the current directory on the path, and what would be loaded.

    Nothing is imported, not even the packages around it; a package that changes its own path may have any module.

    Args:
        name: full, such as "apex.amp".

    Returns:
        True also where it cannot be known. The spec is None if there is no such module, and where it cannot be known.
    """
    importlib.invalidate_caches()
    top, *rest = name.split(".")
    if not all(part.isidentifier() for part in (top, *rest)):
        return False, None
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    except ValueError:  # loaded, from an unknown location
        return True, None
    for part in rest:
        if spec is None:
            return False, None
        inner = PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
        if inner is None:
            return _may_create_submodules(spec), None
        spec = inner
    return spec is not None, spec


def _may_create_submodules(spec: ModuleSpec) -> bool:
    """Return whether a module may create submodules that are not files in its folder, as `os` creates `os.path`."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return spec.submodule_search_locations is None
    try:
        return bool(ANY_MODULE.search(Path(spec.origin).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return True


@contextmanager
def silenced_import() -> Iterator[None]:
    """Silence warnings and logs of a library and its dependencies while they are imported; users cannot act on them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
