"""What the files around a module say about it: whether training begins in one of them and goes on in another."""

import ast
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from ampcompare.base.files.read import FileFault
from ampcompare.source.document import read_bytes
from ampcompare.source.find import find_sources
from ampcompare.source.module import Module
from ampcompare.source.syntax import SourceInvalid, parse_tree

IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import\b[ \t]*(\([^)]*|[^\n#]*)|import[ \t]+([\w.]+))", re.MULTILINE
)
# Of Apex, or of files that are migrated already.
INITIALIZES = re.compile(r"\bamp\.initialize\(|\.grad_scaler = ")
NEEDS = re.compile(r"\bamp\.(?:scale_loss|master_params|state_dict|load_state_dict)\(|\.grad_scaler(?:\.| if )")
BACKWARD = re.compile(r"\.backward\(")
LEVELS = 5  # folders above a module in which the modules that it imports are looked for
TOP = (".git", "setup.py", "pyproject.toml", "requirements.txt", "README.md")  # next to the topmost scripts
WIDTH = 2000  # files below a folder that are looked at


@dataclass(frozen=True)
class Around:
    """What other modules have to do with a module.

    Attributes:
        across: whether an optimizer of the module is also stepped by functions of another one, or the other way round.
        path: of the module; None if it is text alone.
    """

    across: bool = False
    path: Path | None = None

    def is_given(self, text: str) -> bool:
        """Return whether a module around that imports a module, or that it imports, initializes."""
        if self.path is None:
            return True
        path = self.path
        if any(INITIALIZES.search(_text(each)) for each in _imported_files(path, text)):
            return True
        return _is_imported_by_script(path)

    def running(self, module: Module) -> set[str]:
        """Return the functions of other files that run a backward pass, by what a module calls them."""
        found: set[str] = set()
        for node, alias, _ in module.imports if self.path is not None else ():
            found |= _running_names(Path(str(self.path)), node, alias)
        return found

    def importers(self, names: Collection[str], *, star: bool) -> dict[str, Path]:
        """Return which of the names of a module another one has from it, by `import *` too, with the first of these."""
        found: dict[str, Path] = {}
        if self.path is None or not names:
            return found
        own = {self.path.stem, self.path.parent.name}
        for other in filter(Path.is_file, _around(self.path)):  # not a link to nothing
            status = other.stat()
            if own & _imported_words(other, status.st_mtime_ns, status.st_size):
                for name in _names_taken(self.path, other, names, star=star):
                    found.setdefault(name, other)
        return found


ALONE = Around()


def _running_names(path: Path, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> set[str]:
    """Return what a module calls those functions that run a backward pass and that one name of an import gives it."""
    text = f"import {alias.name}"
    if isinstance(node, ast.ImportFrom):
        text = f"from {'.' * node.level}{node.module or ''} import {alias.name}"
    found: set[str] = set()
    own = alias.asname or alias.name
    for place in _imported_files(path, text):
        names = _running_in(_text(place))
        if isinstance(node, ast.Import) or place.stem == alias.name:
            found |= {f"{own}.{name}" for name in names}
        elif alias.name == "*":
            found |= names
        elif alias.name in names:
            found.add(own)
    return found


def _running_in(content: str) -> set[str]:
    try:
        functions = parse_tree(content).body if BACKWARD.search(content) is not None else []
    except SourceInvalid:
        return set()
    return {
        node.name
        for node in functions
        if isinstance(node, ast.FunctionDef) and BACKWARD.search(ast.unparse(node)) is not None
    }


def look_around(path: Path, text: str) -> Around:
    """Return what the files around a module have to do with it."""
    return Around(INITIALIZES.search(text) is not None and _trains_elsewhere(path, text), path)


def _trains_elsewhere(path: Path, text: str) -> bool:
    """Return whether a module that initializes gives its optimizer to functions of another module that need the scaler.

    They train, or save it. That is so if it imports from such a module, or if another script next to it initializes and
    imports from it.
    """
    if any(NEEDS.search(_text(each)) for each in _imported_files(path, text)):
        return True
    if NEEDS.search(text) is None:
        return False
    return _is_imported_by_script(path)


def _is_imported_by_script(path: Path) -> bool:
    """Return whether a module near another one initializes and imports it."""
    near = (other for folder in (path.parent, path.parent.parent) for other in folder.glob("*.py") if other != path)
    return any(INITIALIZES.search(text := _text(other)) and path in _imported_files(other, text) for other in near)


def _around(path: Path) -> list[Path]:
    """Return the other files of the project of a module, those next to it first."""
    top = path.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    if top == path.parent and not any((top / name).exists() for name in TOP):
        top = top.parent
    near, wide = find_sources([str(path.parent)]), find_sources([str(top)])
    return [each for each in dict.fromkeys([*islice(near, WIDTH), *islice(wide, WIDTH)]) if each != path]


@lru_cache(maxsize=2 * WIDTH)
def _imported_words(path: Path, modified: int, size: int) -> frozenset[str]:
    """Return the parts of names in the imports of a file, as it is at a time."""
    return frozenset(word for match in IMPORT.finditer(_text(path)) for word in re.findall(r"\w+", match.group()))


def _names_taken(path: Path, other: Path, names: Collection[str], *, star: bool) -> Iterator[str]:
    """Yield the names of a module that another one imports from it, or reads from it as attributes."""
    content = _text(other)
    for match in IMPORT.finditer(content):
        if path not in _imported_files(other, match.group()):
            continue
        imported = re.findall(r"\w+|\*", match.group(2) or "")
        for name in names:
            by_star = star and "*" in imported and re.search(rf"\b{name}\b", content) is not None
            imported += re.findall(rf"\b{path.stem}[ \t]+as[ \t]+(\w+)", content)
            module = rf"\b(?:{path.stem}|{'|'.join(imported) or path.stem})\.{name}\b".replace("*", r"\*")
            if name in imported or by_star or re.search(module, content) is not None:
                yield name


def _imported_files(path: Path, text: str) -> Iterator[Path]:
    """Yield the files around a module that it imports."""
    held: dict[Path, set[str]] = {}  # a look at a folder is cheaper than one at each name
    for match in IMPORT.finditer(text):
        name = match.group(1) or match.group(3)
        parts = [part for part in name.split(".") if part]
        folders = [path.parent, *path.parent.parents][:LEVELS]
        if name.startswith(".") and len(name) - len(name.lstrip(".")) <= len(folders):
            folders = [folders[len(name) - len(name.lstrip(".")) - 1]]
        for folder in folders:
            if folder not in held:
                held[folder] = _names(folder)
            if parts and not held[folder] & {parts[0], f"{parts[0]}.py"}:
                continue
            found = list(_modules(folder.joinpath(*parts), match.group(2)))
            yield from (each for each in found if each != path)
            if found:
                break


def _modules(place: Path, names: str | None) -> Iterator[Path]:
    """Yield the module at a place, or the package there with those of its modules that are imported by name."""
    if place.name and (module := place.with_name(f"{place.name}.py")).is_file():
        yield module
        return
    if names and (package := place / "__init__.py").is_file():
        yield package
    for name in re.findall(r"(\w+)(?:[ \t]+as[ \t]+\w+)?", names or ""):
        if (module := place / f"{name}.py").is_file():
            yield module


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8", errors="replace")
    except FileFault:
        return ""
