"""A module or package `apex` of a project's own, which is not NVIDIA's, and copies of NVIDIA's in a project."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ampcompare.source.migrate.read.finding import BY_HAND, Finding
from ampcompare.source.module import Module
from ampcompare.source.project import ImportIndex

OWN = (
    "apex is {0} of this project here, and not NVIDIA's; what it does is not known, so that this file stays as it is; "
    "where it only hands on NVIDIA's, import that itself"
)
NAMES_APEX = re.compile(r"\b(?:import|from)\s+apex\b")
OF_NVIDIA = Path("amp", "frontend.py")  # in every copy of NVIDIA's package


def is_in_copy_of_apex(path: Path) -> bool:
    """Return whether a file is a part of NVIDIA's own package, as a project carries it along."""
    return any(each.name == "apex" and (each / OF_NVIDIA).is_file() for each in path.absolute().parents)


def find_import_of_own_apex(path: Path, text: str, imports: ImportIndex) -> Finding | None:
    """Return the first import by which a file gets an `apex` of the project's own; None where `apex` is NVIDIA's.

    Args:
        path: of the file.
        text: of the file.
        imports: of the project.
    """
    if NAMES_APEX.search(text) is None:  # before it is parsed
        return None
    statements = [each for each, _, full in Module(text).imports if full.partition(".")[0] == "apex"]
    if not statements:
        return None
    path = path.absolute()
    found = [imports.find_module_file(path, "apex")]
    if "sys.path" in text:
        found += [each for each in imports.files_below(path.parent) if _is_module_named_apex(each)]
    for each in found:
        if each is not None and each != path and _is_top_module(each) and not is_in_copy_of_apex(each):
            return Finding.of_node(statements[0], BY_HAND, OWN.format(os.path.relpath(each, path.parent)))
    return None


def _is_module_named_apex(path: Path) -> bool:
    return path.name == "apex.py" or (path.name == "__init__.py" and path.parent.name == "apex")


def _is_top_module(path: Path) -> bool:
    """Return whether a module is found by its name alone: no package is around it."""
    folder = path.parent.parent if path.name == "__init__.py" else path.parent
    return not (folder / "__init__.py").exists()
