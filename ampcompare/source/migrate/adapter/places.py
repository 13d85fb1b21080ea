"""Find where a project's files import from, so that all of them find the adapter."""

import ast
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

from ampcompare.source.amp_names import APEX
from ampcompare.source.document import parse_document, read_source_bytes
from ampcompare.source.find import absolute_path, folders_up_to_repository
from ampcompare.source.project import LEVELS, MAX_FILES, TOP, ImportIndex, file_of_module, names_in_imports
from ampcompare.source.syntax import DefinitionNode, ImportNode

STANDARD = sys.stdlib_module_names | {"test"}
MAX_WAY = 2  # folders, from one above a file down to one that `sys.path` leads to
# Packages that a project does not install, or that stand in the place of a module of Python's own.
SCRATCH = re.compile(r"(?i)(?:tests?|testing|te?mp|scratch|sandbox|examples?|demos?)(?:_.*|\d*)")
SHOWN = re.compile(r"(?i)(?:tests?|testing|examples?|demos?|docs?)(?:_.*|\d*)")
PATH = re.compile(rb"\bsys\.path\b")


class ImportRoots:
    """The folders from which the files of a project import.

    Args:
        paths: files that are named together.
        index: which file imports which, as one run asks it.
    """

    def __init__(self, paths: Iterable[Path], index: ImportIndex) -> None:
        self._given = [absolute_path(path) for path in paths]
        self._index = index
        self._known: dict[tuple[Path, str], Path | None] = {}
        self._folders: dict[tuple[Path, Path], list[Path]] = {}
        self._roots: dict[Path, tuple[Counter[Path], Counter[Path]]] = {}

    def import_root_of(self, path: Path, text: str) -> Path:
        """Return the folder from which a file imports the modules of its project, as `sys.path` must have it.

        It is that from which another file imports it; then the nearest folder that has a module which the file
        imports; without one the folder of a script, which is always found; then that from which a file that lies with
        it is imported, or the one that holds its package.
        """
        folders = _folders_up_to_project(path)
        # so many are packages, with `__init__.py` or without
        folders = (
            folders[_num_folders_imported_upwards(text) if path.suffix == ".py" else 0 :] or folders[-1:]
        )
        exact, near = self._roots_of_file_and_of_neighbors(path)
        shown = {absolute_path(folder): folder for folder in folders}
        for roots in (exact, near):
            found = [
                (count, -list(shown).index(root), root) for root, count in roots.items() if root in shown
            ]
            if found:
                return shown[max(found)[2]]
            if roots is exact:
                names = _nonstandard_top_packages_imported(text)
                for folder in folders:
                    if any(
                        _has_module(folder, name, path)
                        and absolute_path(folder / f"{name}.py") not in self._files_imported_relatively
                        for name in names
                    ):
                        return folder
                if path.name != "__init__.py" and is_script(path):
                    return folders[0]
        return next((each for each in folders if not _is_package(each)), folders[0])

    def is_file_or_sibling_imported_from(self, root: Path, path: Path) -> bool:
        """Return whether a file, or one that lies with it, is imported from a folder by another file."""
        exact, near = self._roots_of_file_and_of_neighbors(path)
        return absolute_path(root) in {*exact, *near}

    def roots_resolving_module_elsewhere(self, path: Path, name: str, place: Path) -> list[Path]:
        """Return the folders from which other files import a file, and from which the name of a module leads elsewhere.

        Args:
            name: of the module, with dots.
            place: its file, which may not be there yet.
        """
        exact, _ = self._roots_of_file_and_of_neighbors(path)
        file = absolute_path(place)
        return sorted(each for each in exact if each.joinpath(*name.split(".")).with_suffix(".py") != file)

    def has_importer_directly_in(self, root: Path, path: Path) -> bool:
        """Return whether a file in a folder itself, none below it, imports a file from there.

        For a module it may import it from a folder above, too: where it runs, its own folder comes first in `sys.path`.
        """
        own, folder = absolute_path(path), absolute_path(root)
        base = self._project_folder_of(own)
        tops = [folder] if is_script(path) else _folders_up_to(folder / "_", base) or [folder]
        return any(
            importer.parent == folder
            and any(self._index.file_of_module_below(top, name) == own for top in tops)
            for importer, name in self._imports
        )

    def package_for_adapter(self, root: Path, paths: Iterable[Path]) -> str:
        """Return the package right below a folder in which the adapter of files lies; "" for the folder itself.

        It holds most of the files, and the others find it: they import it, as far as any import says. In a folder of
        tests, or one with a name of the standard library, the adapter lies only if nothing else is there. Scripts in
        other folders, which hold none of it, have it in a package that all of them import: an installed package is
        found where the folder that it lies in is not.
        """
        paths = [path for path in paths if path.is_relative_to(root)]
        tops = Counter(path.relative_to(root).parts[0] for path in paths if path.parent != root)
        packages = [name for name in tops if _is_package(root / name) and name not in STANDARD]
        if len(packages) > 1 or sum(map(tops.__getitem__, packages)) < len(paths):
            packages = [name for name in packages if not SCRATCH.fullmatch(name)]
        if sum(map(tops.__getitem__, packages)) < len(paths):
            packages = [name for name in packages if self._is_imported_from_outside(root / name)]
        if not packages and not any(path.parent == root for path in paths):
            return self._package_imported_by_all(root, paths)
        return max(packages, key=tops.__getitem__, default="")

    def _is_imported_from_outside(self, package: Path) -> bool:
        own = absolute_path(package)
        return any(
            name.split(".")[0] == own.name and not importer.is_relative_to(own)
            for importer, name in self._imports
        )

    def imports_module_only_below(self, path: Path, root: Path) -> bool:
        """Return whether a file imports a module that lies below a folder, and in no folder above the file itself.

        No folder that is nearer to the file may have such a module: another project has one of the same name. A script
        must change `sys.path`, itself or by a module next to it: nothing else leads it out of its own folder.
        """
        if path.parent != root and is_script(path) and not _may_sys_path_change_near(path):
            return False
        own, base = absolute_path(path), self._project_folder_of(path)
        common = Path(os.path.commonpath([own, absolute_path(root)]))
        if len(absolute_path(root).relative_to(common).parts) > MAX_WAY:
            return False
        nearer = list(own.parents)[: list(own.parents).index(common)]
        return any(
            self._nearest_folder_with_module(own.parent, name, base) is None
            and not any(_has_module_in_folder_below(folder, name.split(".")) for folder in nearer)
            for name in self._absolute_imports_of(own)
            if self._index.file_of_module_below(root, name)
        )

    def _roots_of_file_and_of_neighbors(self, path: Path) -> tuple[Counter[Path], Counter[Path]]:
        """Return the folders from which a file is imported, and those from which modules that lie with it are.

        Of imports that lead nowhere from where they stand, as in a file that changes `sys.path`, is run by one that
        does, or uses the package as it is installed, those by the bare name of the file count only without others.
        """
        own = absolute_path(path)
        if own not in self._roots:
            self._roots[own] = self._count_roots_of_file_and_of_neighbors(own)
        return self._roots[own]

    def _count_roots_of_file_and_of_neighbors(self, own: Path) -> tuple[Counter[Path], Counter[Path]]:
        base = self._project_folder_of(own)
        project = _topmost_project_folder(own, base)
        named = (
            Path(os.path.commonpath([each.parent for each in self._given])) if len(self._given) > 1 else base
        )
        exact, near, guesses_by_bare_name = Counter[Path](), Counter[Path](), Counter[Path]()
        above = _folders_up_to(own, base)
        # a module of the project that is called `apex` is none that other files mean by this name
        names = {own.stem, *(each.name for each in above if each != base)} - set(APEX)
        beside: dict[Path, bool] = {}  # whether what an importer names may lie with the file
        for importer, name in chain.from_iterable(
            self._imports_by_first_part.get(each, ()) for each in names
        ):
            if importer == own:
                continue
            found = (exact, near)
            root = self._nearest_folder_with_module(importer.parent, name, base)
            if root is None:
                if importer not in beside:
                    beside[importer] = importer.is_relative_to(project) and importer.is_relative_to(named)
                if not beside[importer]:
                    continue
                root = next((each for each in above if self._index.file_of_module_below(each, name)), None)
                found = (guesses_by_bare_name, near) if root == own.parent else (exact, near)
            if root is None or root not in above:
                continue
            if self._index.file_of_module_below(root, name) == own:
                found[0][root] += 1
            elif own.relative_to(root).parts[0] == name.partition(".")[0]:
                found[1][root] += 1
        if not exact and own not in self._files_imported_relatively:
            exact = guesses_by_bare_name
        return exact, near

    def _nearest_folder_with_module(self, folder: Path, name: str, base: Path) -> Path | None:
        """Return the nearest folder, from one upwards, that has a module of a name."""
        if (folder, name) not in self._known:
            first = name.partition(".")[0]
            if (folder, base) not in self._folders:
                self._folders[folder, base] = _folders_up_to(folder / "_", base)
            self._known[folder, name] = next(
                (
                    each
                    for each in self._folders[folder, base]
                    if self._index.file_of_module_below(each, name) and not _is_package_named(each, first)
                ),
                None,
            )
        return self._known[folder, name]

    @cached_property
    def _files_imported_relatively(self) -> set[Path]:
        """The files that another one imports as modules of its package, so that their bare names mean others."""
        found = set[Path]()
        for importer in dict.fromkeys(file for file, _ in self._imports):
            for name in self._index.names_in_imports_of(importer):
                count = len(name) - len(name.lstrip("."))
                folders = [*importer.parents][count - 1 : count] if count and name.strip(".") else []
                file = self._index.file_of_module_below(folders[0], name[count:]) if folders else None
                if file is not None:
                    found.add(file)
        return found

    @cached_property
    def _imports(self) -> list[tuple[Path, str]]:
        """The imports of all files around: the file, and the dotted name of a module or of what is in it.

        Where these are too many, those that are named are among them in any case.
        """
        bases = {self._project_folder_of(path) for path in self._given}
        tops = [each for each in bases if not any(each != one and each.is_relative_to(one) for one in bases)]
        around = islice(chain.from_iterable(map(self._index.files_below, sorted(tops))), MAX_FILES)
        return [
            (file, name)
            for file in dict.fromkeys([*self._given, *around])
            if file.suffix == ".py"
            for name in self._absolute_imports_of(file)
        ]

    @cached_property
    def _imports_by_first_part(self) -> dict[str, list[tuple[Path, str]]]:
        found: dict[str, list[tuple[Path, str]]] = {}
        for file, name in self._imports:
            found.setdefault(name.partition(".")[0], []).append((file, name))
        return found

    def _absolute_imports_of(self, file: Path) -> list[str]:
        return [name for name in self._index.names_in_imports_of(file) if not name.startswith(".")]

    def _package_imported_by_all(self, root: Path, paths: Sequence[Path]) -> str:
        """Return a package of a folder that all files import; "" for none."""
        imported = [
            _nonstandard_top_packages(self._index.names_in_imports_of(absolute_path(path))) for path in paths
        ]
        names = set[str].intersection(*imported) if imported else set[str]()
        found = (name for name in sorted(names) if _is_package(root / name) and not SCRATCH.fullmatch(name))
        return next(found, "")

    def _project_folder_of(self, path: Path) -> Path:
        """Return the folder that holds all of the project: of a repository, or the working directory."""
        if folders := folders_up_to_repository(path, end=Path.cwd()):
            return folders[-1]
        return Path(os.path.commonpath([each.parent for each in (absolute_path(path), *self._given)]))


def _folders_up_to(path: Path, base: Path) -> list[Path]:
    """Return the folders above a file, up to a base and with it; none where the base is not above."""
    return [each for each in path.parents if each.is_relative_to(base)]


def _topmost_project_folder(path: Path, base: Path) -> Path:
    """Return the topmost folder above a file, up to a base, with what lies in the folder of a project; else the base.

    Of projects that lie side by side, none imports what another one has.
    """
    above = reversed(_folders_up_to(path, base))
    return next((each for each in above if any((each / name).exists() for name in TOP)), base)


def is_test_or_example(path: Path) -> bool:
    """Return whether a file says by its name or a folder of its repository that it only shows the use of others."""
    own = absolute_path(path)
    base = _topmost_project_folder(own, [*own.parents][:LEVELS][-1])
    names = own.relative_to(base).with_suffix("").parts
    return any(map(SHOWN.fullmatch, names))


def is_script(path: Path) -> bool:
    """Return whether a file is run rather than imported: it says so, is a notebook, or trains where it is imported.

    One with relative imports runs by `python -m`, as a module of its package.
    """
    content = read_source_bytes(path)
    if path.suffix == ".py" and _num_folders_imported_upwards(content.decode("utf-8", errors="replace")):
        return False
    return (
        path.suffix != ".py"
        or b"__main__" in content
        or (b"scale_loss" in content and _scales_loss_at_top(path, content))
    )


def apex_import_above_sys_path_change(path: Path, text: str) -> ast.stmt | None:
    """Return the first import of Apex if it stands above the first line that changes `sys.path`.

    That is done by the file itself, or by a module next to it, as `import _init_paths`.
    """
    nodes = list(ast.walk(ast.parse(text)))
    imports = [each for each in nodes if isinstance(each, ImportNode)]
    of_apex = [each for each in imports if _is_import_of_apex(each)]
    first = min(of_apex, key=lambda each: each.lineno, default=None)
    changes = [
        each.lineno for each in nodes if isinstance(each, ast.Attribute) and ast.unparse(each) == "sys.path"
    ]
    for each in imports if first is not None else ():
        names = [alias.name for alias in each.names] if isinstance(each, ast.Import) else [each.module or ""]
        if _may_neighbor_change_sys_path(path, names):
            changes.append(each.lineno)
    return first if first is not None and changes and first.lineno < min(changes) else None


def _may_sys_path_change_near(path: Path) -> bool:
    """Return whether a file, or a module next to it that it imports, may change `sys.path`, as it names that."""
    content = read_source_bytes(path)
    names = _nonstandard_top_packages_imported(content.decode("utf-8", errors="replace"))
    return bool(PATH.search(content)) or _may_neighbor_change_sys_path(path, names)


def _may_neighbor_change_sys_path(path: Path, names: Iterable[str]) -> bool:
    """Return whether a module next to a file, of one of some names, names `sys.path`."""
    neighbors = (path.with_name(f"{name}.py") for name in names if name.isidentifier())
    return any(each.is_file() and PATH.search(read_source_bytes(each)) for each in neighbors)


def _is_import_of_apex(statement: ImportNode) -> bool:
    if isinstance(statement, ast.Import):
        return any(alias.name.split(".")[0] in APEX for alias in statement.names)
    return not statement.level and (statement.module or "").split(".")[0] in APEX


def _num_folders_imported_upwards(text: str) -> int:
    """Return how many folders the relative imports of a text go up, with its own; 0 without any."""
    return max((len(name) - len(name.lstrip(".")) for name in names_in_imports(text)), default=0)


def _has_module_in_folder_below(folder: Path, parts: Sequence[str]) -> bool:
    """Return whether a folder right below another one has a module."""
    return any(file_of_module(each, parts) for each in folder.glob("*"))


def _scales_loss_at_top(path: Path, content: bytes) -> bool:
    """Return whether a module names `scale_loss` outside of its functions and classes."""
    waiting: list[ast.AST] = [*ast.parse(parse_document(path, content).text).body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Attribute) and node.attr == "scale_loss":
            return True
        if not isinstance(node, DefinitionNode):
            waiting += ast.iter_child_nodes(node)
    return False


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file() and absolute_path(folder).name.isidentifier()


def _is_package_named(folder: Path, name: str) -> bool:
    """Return whether a folder is the package that its own files mean by a name, whatever module of that name it has."""
    return absolute_path(folder).name == name and _is_package(folder)


def _folders_up_to_project(path: Path) -> list[Path]:
    """Return the folder of a file and those above it, up to that of a repository or the working directory."""
    count = len(folders_up_to_repository(path, end=Path.cwd()))
    return [path.parent, *path.parent.parents][: count or len(absolute_path(path).parents)]


def _nonstandard_top_packages_imported(text: str) -> set[str]:
    """Return the first parts of the absolute imports of a module, without the standard library.

    A package may have a module of such a name: `pack/typing.py` is not what `import typing` means there.
    """
    return _nonstandard_top_packages(names_in_imports(text))


def _nonstandard_top_packages(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names} - {"apex", "torch", ""} - STANDARD


def _has_module(folder: Path, name: str, path: Path) -> bool:
    if _is_package_named(folder, name):
        return False
    file, package = folder / f"{name}.py", folder / name
    return (file.is_file() and file != path) or (package.is_dir() and any(package.glob("*.py")))
