"""Arms of other libraries and packages on the command line: listed, refused, and never mixed up."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]


def _row(text: str, arm: str) -> str:
    return next(line for line in text.splitlines() if line.split(" ")[0] == arm)


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
    done = forked_python.run(
        ["-m", "ampcompare", "run", "--arm", "actnn:bits=2", "-q"], tmp_path, environment
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "the backend 'actnn' is registered twice" in line
    assert "theirs:ActNN" in line
