"""Files: what is read, what is corrected, and what keeps nothing else from being examined."""

import json
from pathlib import Path

from ampcompare.source.edits import Edit, apply_edits
from ampcompare.source.lint.run import LintSelection, lint_files

TYPO = 'm, o = amp.initialize(m, o, opt_level="01")\n'
SCRIPT = f"from apex import amp  # noqa\n{TYPO}"


def lint(*paths: Path, fix: bool = False) -> tuple[list[str], list[str], int]:
    report = lint_files(paths, LintSelection(), fix=fix)
    return (
        [f"{one.path.name}:{one.place}:{one.code}" for one in report.findings],
        list(map(str, report.unread)),
        report.fixed,
    )


def test_encodings_and_newlines_survive_a_fix(tmp_path: Path) -> None:
    """Only what is wrong changes; everything else is the same to the byte."""
    path = tmp_path / "train.py"
    head = "# coding: latin-1\r\n# é\r\n".encode("latin-1")
    path.write_bytes(head + SCRIPT.replace("\n", "\r\n").encode())

    assert lint(path, fix=True) == ([], [], 1)
    assert path.read_bytes() == head + SCRIPT.replace("01", "O1").replace("\n", "\r\n").encode()


def test_notebooks(tmp_path: Path) -> None:
    """A finding has the number of its cell, and a fix changes that cell alone."""
    path = tmp_path / "book.ipynb"
    cells = [
        {"cell_type": "code", "source": source}
        for source in (["%time\n", "from apex import amp  # noqa"], [TYPO])
    ]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}, indent=1), encoding="utf-8")
    before = path.read_text(encoding="utf-8")

    assert lint(path)[0] == ["book.ipynb:cell 2:1:39:AMP108"]
    assert lint(path, fix=True) == ([], [], 1)
    assert path.read_text(encoding="utf-8") == before.replace("01", "O1")


def test_a_file_without_findings_is_not_written(tmp_path: Path) -> None:
    """`--fix` leaves the file itself alone where there is nothing to correct."""
    path = tmp_path / "train.py"
    path.write_text("import torch\nwith torch.autocast('cuda'):\n    pass\n", encoding="utf-8")
    before = path.stat()

    lint(path, fix=True)

    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_edits_that_overlap() -> None:
    """Of two sets of edits at one place the first is made, and equal edits are made once."""
    first, again, other = (Edit(0, 2, "xy"),), (Edit(0, 2, "xy"), Edit(3, 3, "!")), (Edit(1, 3, "z"),)

    assert apply_edits("abc", [first, again, other]) == ("xyc!", [first, again])
