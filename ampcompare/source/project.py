"""The Python files of a project: which file an import names, and which files import one."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from weakref import WeakKeyDictionary, WeakValueDictionary

from ampcompare.base.files.read import FileFault
from ampcompare.source.amp_names import ADAPTER, APEX, is_in_adapter_module
from ampcompare.source.document import parse_document, read_source_bytes
from ampcompare.source.find import absolute_path, find_sources
from ampcompare.source.module import Module
from ampcompare.source.syntax import SourceInvalid

LEVELS = 5  # folders above a module in which the modules that it imports are looked for
TOP = (".git", "setup.py", "pyproject.toml", "requirements.txt", "README.md")  # next to the topmost scripts
ROOT = (".git", "pyproject.toml", "setup.py", "setup.cfg")  # in the root of a repository or package
MAX_FILES = 2000  # below a folder that are looked at
MAX_MODULES = 150  # of a project that are parsed
# Imports, wherever they stand.
FROM = re.compile(
    r"(?:^|[;:])[ \t]*from\b[ \t]*(\.*[\w.]*?)[ \t]*\bimport\b[ \t]*(\((?:[^)#]|#[^\n]*)*\)|[^\n#;]*)",
    re.MULTILINE,
)
IMPORT = re.compile(r"(?:^|[;:])[ \t]*import[ \t]+([^\n#;]*)", re.MULTILINE)
COMMENT = re.compile(r"#[^\n]*")
WORDS = re.compile(r"\w+")


class ImportIndex:
    """Which file imports which, asked once for each file, however many files one run moves.

    What it has read of a file is as that was then: after files are written, another one is made.

    Attributes:
        within: folders and files that were named together; all that is in them is of one project.
    """

    def __init__(self, within: Iterable[str | Path] = ()) -> None:
        self.within = tuple(absolute_path(Path(each)) for each in within)
        self._module_files: dict[tuple[Path, str], Path | None] = {}
        self._files_of_names: dict[tuple[Path, str], Path | None] = {}
        self._entries: dict[Path, set[str]] = {}  # a look at a folder is cheaper than one at each name
        self._files_below: dict[Path, list[Path]] = {}
        self._files_around: dict[Path, list[Path]] = {}
        self._names_in_imports: dict[Path, tuple[str, ...]] = {}
        self._files_with_word: dict[str, set[Path]] = {}
        self._is_counted: set[Path] = set()  # among the files of words
        self._imported: dict[Path, list[Path]] = {}
        self._unparsed: set[Path] = set()
        self._importing: dict[Path, list[Path]] = {}
        self._reached: dict[Path, frozenset[Path]] = {}
        self._above: dict[Path, list[Path]] = {}
        self._around: dict[Path, list[Path]] = {}
        self._programs: dict[Path, list[Path]] = {}
        self._answers: dict[tuple[Path, Callable[[Module], bool]], bool] = {}
        # no more are kept in memory than others keep
        self._modules = WeakValueDictionary[Path, Module]()
        self._paths = WeakKeyDictionary[Module, Path]()

    def index_with_module(self, path: Path, module: Module) -> ImportIndex:
        """Return the index in which a file has another text: this one where both import the same files.

        Args:
            path: of the file.
            module: of the other text.
        """
        if self._modules.get(path) is module:
            return self
        imported = self._resolve_imports(module, path)
        if imported == self.files_imported_by(path):
            return self
        other = ImportIndex(self.within)
        other._imported[path] = imported
        return other

    # Modules.

    def module_of_file(self, path: Path) -> Module | None:
        """Return the module of a file; None if it cannot be read or parsed."""
        module = self._modules.get(path)
        if module is None:
            try:
                status = path.stat()
            except OSError:
                return None
            module = _parse_file(path, status.st_mtime_ns, status.st_size)
            if module is not None:
                self._modules[path] = module
                self._paths[module] = path
        return module

    def path_of(self, module: Module) -> Path | None:
        """Return the file of a module that was asked for."""
        return self._paths.get(module)

    def is_question_true_of_module(self, path: Path, question: Callable[[Module], bool]) -> bool:
        """Return what a question answers of the module of a file, False without one; each is asked once.

        Args:
            path: of the file.
            question: a function of the module of a file, by whose name the answer is kept.
        """
        if (path, question) not in self._answers:
            module = self.module_of_file(path)
            self._answers[path, question] = module is not None and question(module)
        return self._answers[path, question]

    def imports_adapter(self, path: Path) -> bool:
        """Return whether a file imports the adapter; one without the word in its imports is not parsed."""
        words = WORDS.findall(" ".join(self.names_in_imports_of(path)))
        return ADAPTER in words and self.is_question_true_of_module(path, is_module_importing_adapter)

    # Names.

    def find_module_file(self, importer: Path, name: str) -> Path | None:
        """Return the file of the module that a file imports by a dotted name, or None if the project has none.

        Args:
            importer: the file with the import.
            name: dotted, absolute.
        """
        key = (importer.parent, name)
        if key not in self._module_files:
            self._module_files[key] = self._search_module_file(importer, name)
        return self._module_files[key]

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
        if folder not in self._entries:
            self._entries[folder] = _entry_names_of_folder(folder)
        return self._entries[folder]

    def file_of_module_below(self, root: Path, name: str) -> Path | None:
        """Return the file of a module below a folder; of a package without `__init__.py` the folder; None without any.

        Args:
            root: the folder.
            name: dotted, absolute.
        """
        key = (root, name)
        if key not in self._files_of_names:
            first = name.partition(".")[0]
            is_there = self._names_in_folder(root) & {first, f"{first}.py"}
            self._files_of_names[key] = file_of_module(root, name.split(".")) if is_there else None
        return self._files_of_names[key]

    def find_file_and_name_of_definition(self, importer: Path, full_name: str) -> tuple[Path, str] | None:
        """Return the file in which what an import names is, and its name there; None where it is outside.

        Args:
            importer: the file with the import.
            full_name: of an import; it begins with dots for what is next to the importer. The name that is returned is
                empty for the module itself, and `*` for all that a star import binds.
        """
        name = full_name.rpartition(".")[2]
        if name != "*" and (place := self.find_module_file(importer, full_name)) is not None:
            return place, ""
        holder = full_name[: len(full_name) - len(name)]
        holder = holder if set(holder) <= {"."} else holder.removesuffix(".")
        place = self.find_module_file(importer, holder) if holder else None
        return None if place is None else (place, name)

    # Files.

    def files_imported_by(self, path: Path) -> list[Path]:
        """Return the files of the project that a file imports, itself left out."""
        if path not in self._imported:
            module = self.module_of_file(path)
            if module is None:
                self._unparsed.add(path)
            self._imported[path] = [] if module is None else self._resolve_imports(module, path)
        return self._imported[path]

    def _resolve_imports(self, module: Module, path: Path) -> list[Path]:
        found = [self.find_file_and_name_of_definition(path, full) for _, _, full in module.imports]
        return list(dict.fromkeys(each[0] for each in found if each is not None and each[0] != path))

    def files_importing(self, path: Path) -> list[Path]:
        """Return the files of the project that import one, those next to it first."""
        if path not in self._importing:
            own = frozenset({path.stem, path.parent.name} if path.stem == "__init__" else {path.stem})
            others = self._files_importing_words(path, own)
            self._importing[path] = [each for each in others if path in self.files_imported_by(each)]
        return self._importing[path]

    def files_imported_transitively(self, path: Path) -> frozenset[Path]:
        """Return the files that one imports, and in turn those that these do, up to about `MAX_MODULES`."""
        if path not in self._reached:
            found: set[Path] = set()
            waiting = [path]
            while waiting and len(found) < MAX_MODULES:
                for each in self.files_imported_by(waiting.pop()):
                    if each not in found:
                        found.add(each)
                        waiting.append(each)
            self._reached[path] = frozenset(found)
        return self._reached[path]

    def files_importing_transitively(self, path: Path) -> list[Path]:
        """Return the files of the project that import one, and in turn those that import these."""
        if path not in self._above:
            seen, waiting, found = {path}, [path], []
            while waiting and len(seen) < MAX_MODULES:
                for other in self.files_importing(waiting.pop()):
                    if other not in seen:
                        seen.add(other)
                        waiting.append(other)
                        found.append(other)
            self._above[path] = found
        return self._above[path]

    def other_files_of_program(self, path: Path) -> list[Path]:
        """Return the other files that run where one does: what it imports, what imports it, and all of theirs."""
        if path not in self._programs:
            found = set(self.files_imported_transitively(path))
            for other in self.files_importing_transitively(path):
                found |= {other} | self.files_imported_transitively(other)
            self._programs[path] = sorted(found - {path})
        return self._programs[path]

    def files_connected_by_imports(self, path: Path) -> list[Path]:
        """Return the files that a file imports and that import it, and in turn theirs, each once, without its own.

        Where these are too many, the files of the project that import Apex are among them in any case.
        """
        if path not in self._around:
            seen, waiting, found = {path}, [path], []
            while waiting and len(seen) < MAX_MODULES:
                current = waiting.pop(0)
                imported = self.files_imported_by(current)
                if current in self._unparsed:
                    continue
                if current != path:
                    found.append(current)
                for other in [*imported, *self.files_importing(current)]:
                    if other not in seen:
                        seen.add(other)
                        waiting.append(other)
            if waiting:
                given = {path, *found}
                others = self.project_files_importing_words(path, frozenset(APEX))
                found += [each for each in others if each not in given]
            self._around[path] = found
        return self._around[path]

    def project_files_importing_words(self, path: Path, words: frozenset[str]) -> list[Path]:
        """Return the files of the project of one, itself among them, that have one of some words in imports.

        Without the root of a repository above, only what was named, or is in the folder or package of the file.

        Args:
            path: of a file of the project.
            words: of which one stands in an import.
        """
        is_rooted = any((each / name).exists() for each in list(path.parents)[:LEVELS] for name in ROOT)
        top = path.parent
        while (top.parent / "__init__.py").is_file():
            top = top.parent
        return [
            other
            for other in self._files_importing_words(path, words)
            if is_rooted or any(other.is_relative_to(each) for each in (top, *self.within))
        ]

    def _files_importing_words(self, path: Path, words: frozenset[str]) -> list[Path]:
        """Return the files around one that have one of some words in their imports, those next to it first."""
        around = self._project_files_nearest_first(path.parent)
        found = set[Path]().union(*(self._files_with_word.get(each, ()) for each in words))
        return [each for each in around if each in found]

    def _project_files_nearest_first(self, folder: Path) -> list[Path]:
        """Return the Python files of the project of a folder, those in it first."""
        if folder not in self._files_around:
            top = folder
            while (top / "__init__.py").is_file():
                top = top.parent
            if top == folder and not any((top / name).exists() for name in TOP):
                top = top.parent
            near, wide = self.files_below(folder)[:MAX_FILES], self.files_below(top)[:MAX_FILES]
            found = [each for each in dict.fromkeys([*near, *wide]) if each.suffix == ".py"]
            for each in found:
                self._note_words_in_imports(each)
            self._files_around[folder] = found
        return self._files_around[folder]

    def files_below(self, folder: Path) -> list[Path]:
        """Return the sources below a folder, in a stable order, no more than `MAX_FILES` and some."""
        if folder not in self._files_below:
            self._files_below[folder] = list(islice(find_sources([folder]), MAX_FILES + 1))
        return self._files_below[folder]

    def _note_words_in_imports(self, path: Path) -> None:
        """Note each word in the imports of a file, by which `_files_importing_words` finds it."""
        if path not in self._is_counted:
            self._is_counted.add(path)
            for word in WORDS.findall(" ".join(self.names_in_imports_of(path))):
                self._files_with_word.setdefault(word, set()).add(path)

    def names_in_imports_of(self, path: Path) -> tuple[str, ...]:
        """Return the dotted names of modules that a file imports, and of what it takes from them, by its text alone.

        Those of relative imports begin with dots. What stands in other text, as in a docstring, is among them.
        """
        if path not in self._names_in_imports:
            # not of a link to nothing, nor of a pipe
            text = _text_of_file_or_empty(path) if path.is_file() else ""
            self._names_in_imports[path] = tuple(names_in_imports(text))
        return self._names_in_imports[path]


def is_module_importing_adapter(module: Module) -> bool:
    """Return whether a module imports the adapter, or has its name as a text, as for `importlib.import_module`."""
    texts = (each.value for each in module.nodes if isinstance(each, ast.Constant))
    return any(is_in_adapter_module(full) for _, _, full in module.imports) or any(
        isinstance(each, str) and is_in_adapter_module(each) for each in texts
    )


class Project:
    """The modules around one, parsed when they are asked for.

    Attributes:
        path: of the module that was begun with; None if it is text alone, which has no project.
    """

    def __init__(
        self, path: Path | None = None, module: Module | None = None, imports: ImportIndex | None = None
    ) -> None:
        """Begin with a module.

        Args:
            path: of the module; None if it is text alone.
            module: that is parsed already, of another text perhaps; None for that of the file.
            imports: of the files around; None to ask again.
        """
        self.path = None if path is None else absolute_path(path)
        self._own = module
        self._of_files = ImportIndex() if imports is None else imports

    @cached_property
    def imports(self) -> ImportIndex:
        """Which file imports which, where the file of the module has its text."""
        if self.path is None or self._own is None:
            return self._of_files
        return self._of_files.index_with_module(self.path, self._own)

    def module_of_file(self, path: Path) -> Module | None:
        """Return the module of a file; None if it cannot be read or parsed."""
        return (
            self._own if path == self.path and self._own is not None else self._of_files.module_of_file(path)
        )

    def module_of_text(self, text: str) -> Module:
        """Return the module of a text, which mostly is that of the file that was begun with."""
        known = None if self.path is None else self.module_of_file(self.path)
        return known if known is not None and known.text == text else Module(text)

    def path_of(self, module: Module) -> Path | None:
        """Return the file of a module of the project."""
        return self.path if module is self._own else self._of_files.path_of(module)

    def find_module_file(self, importer: Path, name: str) -> Path | None:
        """Return the file of the module that a file imports by a dotted name, as `ImportIndex` finds it."""
        return self._of_files.find_module_file(importer, name)

    def find_file_and_name_of_definition(self, importer: Path, full_name: str) -> tuple[Path, str] | None:
        """Return the file in which what an import names is, and its name there, as `ImportIndex` finds them."""
        return self._of_files.find_file_and_name_of_definition(importer, full_name)

    def modules_connected_by_imports(self) -> Iterator[tuple[Path, Module]]:
        """Yield the modules of the files around that of the module."""
        if self.path is not None:
            yield from self.modules_of_files(self.imports.files_connected_by_imports(self.path))

    def modules_of_files(self, paths: Iterable[Path]) -> Iterator[tuple[Path, Module]]:
        """Yield the modules of files that can be read and parsed."""
        for path in paths:
            if (module := self.module_of_file(path)) is not None:
                yield path, module


def names_in_imports(text: str) -> Iterator[str]:
    """Yield the dotted names of modules that a text imports, and of what it takes from them.

    Those of relative imports begin with dots. A syntax tree takes 20 times as long: 16 s for 2000 files of 500 lines.
    """
    text = text.replace("\\\n", " ")
    for found in FROM.finditer(text):
        yield found[1]
        for name in COMMENT.sub("", found[2]).strip("() \t\r\n").split(","):
            if word := WORDS.match(name.strip()):
                yield f"{found[1].removesuffix('.') if not found[1].strip('.') else found[1]}.{word[0]}"
    for found in IMPORT.finditer(text):
        for name in found[1].split(","):
            if name.strip():
                yield name.split()[0]


def file_of_module(root: Path, parts: Sequence[str]) -> Path | None:
    """Return the file of a module below a folder; of a package without `__init__.py` the folder; None without any."""
    place = root.joinpath(*parts)
    if (file := place.with_name(f"{place.name}.py")).is_file():
        return file
    if (file := place / "__init__.py").is_file():
        return file
    return place if place.is_dir() else None


def _text_of_file_or_empty(path: Path) -> str:
    try:
        return read_source_bytes(path).decode("utf-8", errors="replace")
    except FileFault:
        return ""


@lru_cache(maxsize=4 * MAX_MODULES)
def _parse_file(path: Path, mtime_ns: int, size: int) -> Module | None:
    try:
        document = parse_document(path, read_source_bytes(path))
        return Module(document.text)
    except (FileFault, SourceInvalid, RecursionError, ValueError):
        return None


def _entry_names_of_folder(folder: Path) -> set[str]:
    """Return the names of the files and folders in a folder; none where it cannot be read."""
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()
