"""The Python files of a project: which file an import names, and which files import one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path

from ampcompare.base.files.read import FileFault
from ampcompare.source.amp_names import APEX
from ampcompare.source.document import parse_document, read_source_bytes
from ampcompare.source.find import find_sources
from ampcompare.source.module import Module
from ampcompare.source.syntax import SourceInvalid

LEVELS = 5  # folders above a module in which the modules that it imports are looked for
TOP = (".git", "setup.py", "pyproject.toml", "requirements.txt", "README.md")  # next to the topmost scripts
ROOT = (".git", "pyproject.toml", "setup.py", "setup.cfg")  # in the root of a repository or package
MAX_FILES = 2000  # below a folder that are looked at
MAX_MODULES = 150  # of a project that are parsed
IMPORT = re.compile(r"^[ \t]*(?:from|import)\b[^\n(]*(?:\([^)]*)?", re.MULTILINE)
WORDS = re.compile(r"\w+")


class Project:
    """The modules around one, parsed when they are asked for.

    Attributes:
        path: of the module that was begun with; None if it is text alone, which has no project.
    """

    def __init__(
        self, path: Path | None = None, module: Module | None = None, within: Iterable[str | Path] = ()
    ) -> None:
        """Begin with a module.

        Args:
            path: of the module; None if it is text alone.
            module: that is parsed already; None to parse the file when it is asked for.
            within: folders and files that were named together; all that is in them is of one project.
        """
        self.path = None if path is None else Path(os.path.abspath(path))
        self._within = [Path(os.path.abspath(each)) for each in within]
        self._own = module
        self._found: dict[tuple[Path, str], Path | None] = {}
        self._listed: dict[Path, list[Path]] = {}
        self._held: dict[Path, set[str]] = {}  # a look at a folder is cheaper than one at each name
        self._paths: dict[Module, Path] = {} if module is None or self.path is None else {module: self.path}

    def module_of_file(self, path: Path) -> Module | None:
        """Return the module of a file; None if it cannot be read or parsed."""
        if path == self.path and self._own is not None:
            return self._own
        try:
            status = path.stat()
        except OSError:
            return None
        module = _parse_file(path, status.st_mtime_ns, status.st_size)
        if module is not None:
            self._paths[module] = path
        return module

    def module_of_text(self, text: str) -> Module:
        """Return the module of a text, which mostly is that of the file that was begun with."""
        known = None if self.path is None else self.module_of_file(self.path)
        return known if known is not None and known.text == text else Module(text)

    def path_of(self, module: Module) -> Path | None:
        """Return the file of a module of the project."""
        return self._paths.get(module)

    def find_module_file(self, importer: Path, name: str) -> Path | None:
        """Return the file of the module that a file imports by a dotted name, or None if the project has none.

        Args:
            importer: the file with the import.
            name: dotted, absolute.
        """
        key = (importer.parent, name)
        if key not in self._found:
            self._found[key] = self._search_module_file(importer, name)
        return self._found[key]

    def _search_module_file(self, importer: Path, name: str) -> Path | None:
        dots = len(name) - len(name.lstrip("."))
        parts = [part for part in name.split(".") if part]
        folders = [importer.parent, *importer.parent.parents][:LEVELS]
        if dots:
            folders = folders[dots - 1 : dots]
        else:
            # a folder of a package is searched last: what is imported by its full name begins above the package
            folders[1:] = sorted(folders[1:], key=lambda each: "__init__.py" in self._names_in_folder(each))
        for folder in folders:
            if parts and not self._names_in_folder(folder) & {parts[0], f"{parts[0]}.py"}:
                continue
            place = folder.joinpath(*parts)
            if parts and (module := place.with_name(f"{place.name}.py")).is_file():
                return module
            if (module := place / "__init__.py").is_file():
                return module
        return None

    def _names_in_folder(self, folder: Path) -> set[str]:
        if folder not in self._held:
            self._held[folder] = _entries_of(folder)
        return self._held[folder]

    def find_file_and_name_of_definition(self, importer: Path, full: str) -> tuple[Path, str] | None:
        """Return the file in which what an import names is, and its name there; None where it is outside.

        Args:
            importer: the file with the import.
            full: the full name of an import, which begins with dots for what is next to the importer. The name that is
                returned is empty for the module itself, and `*` for all that a star import binds.
        """
        name = full.rpartition(".")[2]
        if name != "*" and (place := self.find_module_file(importer, full)) is not None:
            return place, ""
        holder = full[: len(full) - len(name)]
        holder = holder if set(holder) <= {"."} else holder.removesuffix(".")
        place = self.find_module_file(importer, holder) if holder else None
        return None if place is None else (place, name)

    def files_imported_by(self, module: Module, path: Path) -> list[Path]:
        """Return the files of the project that a module imports, itself left out.

        Args:
            module: whose imports are read.
            path: of its file.
        """
        found = [self.find_file_and_name_of_definition(path, full) for _, _, full in module.imports]
        return list(dict.fromkeys(each[0] for each in found if each is not None and each[0] != path))

    def files_importing(self, path: Path) -> Iterator[Path]:
        """Yield the files of the project that import one, those next to it first."""
        own = frozenset({path.stem, path.parent.name} if path.stem == "__init__" else {path.stem})
        for other in self._files_importing_words(path, own):
            module = self.module_of_file(other)
            if module is not None and path in self.files_imported_by(module, other):
                yield other

    def modules_around(self, path: Path) -> Iterator[tuple[Path, Module]]:
        """Yield the modules that a file imports and that import it, and in turn theirs, each once, without its own.

        Where these are too many, the files of the project that import Apex are among them in any case.
        """
        seen = {path}
        waiting = [path]
        given = {path}
        while waiting and len(seen) < MAX_MODULES:
            current = waiting.pop(0)
            module = self.module_of_file(current)
            if module is None:
                continue
            if current != path:
                given.add(current)
                yield current, module
            for other in [*self.files_imported_by(module, current), *self.files_importing(current)]:
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        for other in self._own_files_importing_words(path, frozenset(APEX)) if waiting else ():
            if other not in given and (module := self.module_of_file(other)) is not None:
                yield other, module

    def modules_with(self, path: Path, words: frozenset[str]) -> Iterator[tuple[Path, Module]]:
        """Yield the modules of the project of a file, itself among them, that have one of some words in imports.

        Without the root of a repository above, only what was named, or is in the folder or package of the file.

        Args:
            path: of a file of the project.
            words: of which one stands in an import.
        """
        for other in self._own_files_importing_words(path, words):
            if (module := self.module_of_file(other)) is not None:
                yield other, module

    def _own_files_importing_words(self, path: Path, words: frozenset[str]) -> Iterator[Path]:
        """Yield the files of `_files_importing_words` that more than their place may make a part of the project."""
        is_rooted = any((each / name).exists() for each in list(path.parents)[:LEVELS] for name in ROOT)
        top = path.parent
        while (top.parent / "__init__.py").is_file():
            top = top.parent
        for other in self._files_importing_words(path, words):
            if is_rooted or any(other.is_relative_to(each) for each in (top, *self._within)):
                yield other

    def _files_importing_words(self, path: Path, words: frozenset[str]) -> Iterator[Path]:
        """Yield the files around one that have one of some words in their imports, those next to it first."""
        # not a link to nothing, nor a pipe
        for other in filter(Path.is_file, self._files_around(path.parent)):
            status = other.stat()
            if words & _imported_words(other, status.st_mtime_ns, status.st_size):
                yield other

    def _files_around(self, folder: Path) -> list[Path]:
        """Return the Python files of the project of a folder, those in it first."""
        if folder not in self._listed:
            self._listed[folder] = _list_files(folder)
        return self._listed[folder]


def _list_files(folder: Path) -> list[Path]:
    top = folder
    while (top / "__init__.py").is_file():
        top = top.parent
    if top == folder and not any((top / name).exists() for name in TOP):
        top = top.parent
    near, wide = find_sources([str(folder)]), find_sources([str(top)])
    return [
        each
        for each in dict.fromkeys([*islice(near, MAX_FILES), *islice(wide, MAX_FILES)])
        if each.suffix == ".py"
    ]


@lru_cache(maxsize=2 * MAX_FILES)
def _imported_words(path: Path, modified: int, size: int) -> frozenset[str]:
    """Return the words in the imports of a file, as it is at a time."""
    try:
        text = read_source_bytes(path).decode("utf-8", errors="replace")
    except FileFault:
        return frozenset()
    return frozenset(word for match in IMPORT.finditer(text) for word in WORDS.findall(match.group()))


@lru_cache(maxsize=4 * MAX_MODULES)
def _parse_file(path: Path, modified: int, size: int) -> Module | None:
    try:
        document = parse_document(path, read_source_bytes(path))
        return Module(document.text)
    except (FileFault, SourceInvalid, RecursionError, ValueError):
        return None


def _entries_of(folder: Path) -> set[str]:
    """Return the names of the files and folders in a folder; none where it cannot be read."""
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()
