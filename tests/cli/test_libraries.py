"""Arms of other libraries and packages on the command line: listed, refused, and never mixed up."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampcompare.backends.catalog import BUILT_IN
from ampcompare.backends.library import Library

Call = Callable[..., Any]


def _row(text: str, arm: str) -> str:
    return next(line for line in text.splitlines() if line.split(" ")[0] == arm)


def test_list_shows_what_is_not_installed_with_the_line_to_type(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Library(("no_such",), ("no-such",), "pip install accelerate")
    present = Library(("pytest",), ("pytest",), "pip install pytest")
    for backend, library in (("accelerate", absent), ("fabric", present)):
        monkeypatch.setitem(BUILT_IN, backend, replace(BUILT_IN[backend], library=library))
    out = call("list", "arms").out
    assert _row(out, "accelerate").split(maxsplit=2)[1:] == ["no", "not installed: pip install accelerate"]
    assert f"(pytest {pytest.__version__})" in _row(out, "fabric")
    assert _row(out, "actnn").split()[1] == "yes"


def test_an_arm_whose_library_is_not_there(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain` says what is missing, and how an arm is meant all the same."""
    monkeypatch.setattr(Library, "find", lambda library: None)
    out = call("explain", "accelerate:bf16").out
    assert "not installed: pip install accelerate" in out
    assert "Native equivalent: native:bf16" in out


def test_a_name_of_ours_that_another_package_takes_is_refused(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_python: Any
) -> None:
    """A package that registers `actnn` as well: `list` says so, and `run` ends with 2 and one line naming both."""
    metadata = tmp_path / "theirs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[ampcompare.precisions]\nactnn = theirs:ActNN\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "registered by another package (theirs:ActNN) and by this one" in call("list", "arms").out
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    done = forked_python.run(["-m", "ampcompare", "run", "--arm", "actnn:bits=2", "-q"], tmp_path, environment)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "the backend 'actnn' is registered twice" in line
    assert "theirs:ActNN" in line
