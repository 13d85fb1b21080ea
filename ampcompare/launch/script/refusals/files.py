"""The source files that a script runs: its own, and those of its project that it imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ampcompare.source.document import read_document
from ampcompare.source.syntax import parse_tree

__all__ = ["SourceFile", "SourceFiles", "read_files"]

MAX_FILES = 200
# Installed packages that never use mixed precision on their own.
PLAIN_PACKAGES = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "numpy", "scipy", "sklearn", "pandas", "matplotlib", "PIL", "cv2"),
        *("apex", "amp_C", "ampcompare", "tqdm", "yaml", "tabulate", "wandb", "mlflow", "tensorboardX", "psutil"),
        *("termcolor", "scikit-learn", "packaging", "einops", "h5py", "seaborn", "colorama", "requests"),
    }
)
# They run code that no import names.
OPAQUE_MODULES = frozenset({"importlib", "imp", "runpy", "subprocess"})
OPAQUE_CALLS = frozenset({"__import__", "exec", "eval"})


@dataclass(frozen=True)
class SourceFile:
    """A file that was read and parsed."""

    path: Path
    text: str
    tree: ast.Module


@dataclass(frozen=True)
class SourceFiles:
    """What was found.

    Attributes:
        files: the script first.
        complete: whether these files are all code that can reach mixed precision.
    """

    files: tuple[SourceFile, ...]
    complete: bool


def read_files(script: Path, root: Path) -> SourceFiles:
    """Read a script and what it imports, as far as it is Python source.

    Args:
        root: the first folder in which its imports are looked up.
    """
    found: dict[Path, SourceFile] = {}
    waiting, complete = [script], True
    while waiting:
        path = waiting.pop(0)
        if path in found:
            continue
        if len(found) == MAX_FILES:
            return SourceFiles(tuple(found.values()), complete=False)
        try:
            text = read_document(path).text
            tree = parse_tree(text)
        except (OSError, ValueError):  # the errors of both are of these kinds
            complete = False
            continue
        found[path] = SourceFile(path, text, tree)
        for name in _imported(tree, path, root):
            files = _files_of(name, root)
            waiting += files
            head = name.partition(".")[0]
            if not files and (head in OPAQUE_MODULES or head not in {*sys.stdlib_module_names, *PLAIN_PACKAGES}):
                complete = False
        complete = complete and not any(map(_is_opaque, ast.walk(tree)))
    return SourceFiles(tuple(found.values()), complete)


def _is_opaque(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OPAQUE_CALLS


def _imported(tree: ast.Module, path: Path, root: Path) -> Iterator[str]:
    """Yield the full names of modules that a file imports; `from a import b` may import `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folder = path.parents[node.level - 1]
                parts = folder.relative_to(root).parts if folder.is_relative_to(root) else ()
                base = ".".join([*parts, *filter(None, [node.module])])
            if base:
                yield base
            for alias in node.names:
                name = ".".join(filter(None, [base, alias.name]))
                if _files_of(name, root):
                    yield name


def _files_of(name: str, root: Path) -> list[Path]:
    """Return the files of a module below `root`, those of its parents first; none if it is not there."""
    files: list[Path] = []
    place = root
    for part in name.split("."):
        place /= part
        package, module = place / "__init__.py", place.with_name(f"{place.name}.py")
        if package.is_file():
            files.append(package)
        elif module.is_file():
            files.append(module)
        elif not place.is_dir():
            return [] if place.parent == root else files
    return files
