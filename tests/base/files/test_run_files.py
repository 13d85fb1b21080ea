"""The names of the files of a run directory: in one file of the package, and all on their page."""

import ast
from collections.abc import Iterable
from pathlib import Path

from ampcompare.base.files import run_files
from ampcompare.base.files.run_files import CellFile, RunFile

ROOT = Path(__file__).resolve().parents[3]
NAMES = {
    value
    for group in (RunFile, CellFile)
    for name, value in vars(group).items()
    if name.isupper() and isinstance(value, str)
}

ALSO_ELSEWHERE = {RunFile.LOCK, RunFile.TRACE}  # of a folder of data, and of a replay of migrate


def _texts(path: Path, wanted: Iterable[str] = ("",)) -> list[str]:
    """Return the texts of a program that are no statement by themselves, as docstrings are, if it has a wanted one."""
    program = path.read_text(encoding="utf-8")
    if not any(text in program for text in wanted):
        return []
    tree = ast.parse(program)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in alone)
    return [node.value for node in constants if isinstance(node.value, str)]


def test_no_other_file_has_the_names() -> None:
    """A name that another file writes out would not follow when it changes here."""
    unique = {name for name in NAMES if "." in name} - ALSO_ELSEWHERE
    searched = {*unique, "cells/"}
    own = Path(run_files.__file__)
    found = {
        path.name: texts
        for path in (ROOT / "ampcompare").rglob("*.py")
        if path != own
        and (
            texts := [text for text in _texts(path, searched) if text in unique or text.startswith("cells/")]
        )
    }
    assert not found
    assert unique <= set(_texts(own))


def test_the_page_has_every_name() -> None:
    """A user who finds a file in a run directory finds it on the page about run directories."""
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}" not in page and f"`cells/ID/{name}" not in page] == []
