"""What a project still has of Apex where its files have moved: names that the engine lacks too, and a dependency."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ampcompare.base.files.read import FileFault
from ampcompare.source.amp_names import APEX
from ampcompare.source.document import parse_document, read_source_bytes
from ampcompare.source.find import absolute_path, folders_up_to_repository
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.module import Module
from ampcompare.source.syntax import DefinitionNode, ImportNode, SourceInvalid

# Files that say which packages a project needs, below its folder.
REQUIREMENTS = (
    "setup.py",
    "setup.cfg",
    "pyproject.toml",
    "*requirements*.txt",
    "requirements/*.txt",
    "*environment*.y*ml",
)
PACKAGES = ("setup.py", "setup.cfg", "pyproject.toml")
# A line that asks for Apex: its name as a requirement, or its repository.
ASKS = re.compile(
    r"(?i)github\.com[/:]nvidia/apex\b"
    r"""|^\s*(?:-\s+|["'])?(?:nvidia[-_])?apex\s*(?:$|["',;#\[]|@|[=<>~!]=|[<>]|=\s*\d)"""
    r"""|[\[,(=]\s*["'](?:nvidia[-_])?apex\s*(?:["';\[]|@|[=<>~!]=|[<>])"""
)
COMMENT = re.compile(r"^\s*#")


def apex_names_engine_lacks(path: Path) -> list[str]:
    """Return the full names of Apex that a file imports or uses and ampcompare's engine has not, in their order."""
    try:
        module = Module(parse_document(path, read_source_bytes(path)).text)
    except (FileFault, SourceInvalid, RecursionError):
        return []
    names = ModuleImports(module)
    imported = [
        full for _, _, full in module.imports if full.split(".")[0] in APEX and not full.endswith("*")
    ]
    found = dict.fromkeys([*imported, *(full for _, full in names.uses)])
    lacking = [full for full in found if full.split(".")[0] == "apex" and not _engine_has(full)]
    return [each for each in lacking if not any(each.startswith(f"{other}.") for other in lacking)]


def _engine_has(full_name: str) -> bool:
    """Return whether the engine has a module, or a module a name at its top: what that holds is not looked at."""
    origin = find_spec("ampcompare.apex")
    assert origin is not None
    assert origin.origin is not None
    place = Path(origin.origin).parent
    for part in full_name.split(".")[1:]:
        if (place / part / "__init__.py").is_file():
            place /= part
        elif place.is_dir() and (place / f"{part}.py").is_file():
            place /= f"{part}.py"
        else:
            return part in _names_at_top(place / "__init__.py" if place.is_dir() else place)
    return True


@cache
def _names_at_top(path: Path) -> frozenset[str]:
    bound = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, DefinitionNode):
            bound.add(node.name)
        elif isinstance(node, ImportNode):
            bound |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        if (
            isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
        ):  # of the module: names that it knows
            words = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
            bound |= {each for each in words if isinstance(each, str) and each.isidentifier()}
        bound |= {
            each.id
            for each in ast.walk(node)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
    return frozenset(bound)


def requirements_of_apex(paths: Iterable[Path]) -> list[tuple[Path, int, str]]:
    """Return the lines, with their files and numbers, by which the projects of some files ask for the package Apex."""
    folders = dict.fromkeys(folder for path in paths for folder in _folders_of_project(path))
    files = [file for folder in folders for pattern in REQUIREMENTS for file in sorted(folder.glob(pattern))]
    return [
        found for file in dict.fromkeys(files) if file.is_file() for found in _requirement_lines_of_apex(file)
    ]


def _folders_of_project(path: Path) -> list[Path]:
    """Return the folder of a file and those above it, up to that of its repository or package, if it is in one."""
    folders = folders_up_to_repository(path) or folders_up_to_repository(path, marks=PACKAGES)
    return folders or [absolute_path(path).parent]


def _requirement_lines_of_apex(file: Path) -> Iterator[tuple[Path, int, str]]:
    text = file.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        if ASKS.search(line) and not COMMENT.match(line):
            yield file, number, line.strip().rstrip(",")
