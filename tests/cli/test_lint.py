"""`ampcompare lint` as it is called."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
SCRIPT = 'from apex import amp\nm, o = amp.initialize(m, o, opt_level="01")\n'
FIXED = SCRIPT.replace("01", "O1")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a faulty script, a clean one and one in Python 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "clean.py").write_text("import torch\n", encoding="utf-8")
    (tmp_path / "old.py").write_text("import apex\nprint 'x'\n", encoding="utf-8")
    return tmp_path


def test_findings(call: Call, project: Path) -> None:
    """Findings go to stdout and set the exit code; what was not read and the counts go to stderr."""
    done = call("lint", ".")

    assert done.code == 2
    assert [line.partition(" ")[0] for line in done.out.splitlines()] == ["train.py:1:1:", "train.py:2:39:"]
    assert done.lines[0].startswith("ampcompare: not read: old.py:2: not Python 3, but Python 2: ")
    assert done.lines[1] == "2 findings in 1 of 2 files; --fix corrects 1 of them; 1 file not read"


def test_nothing_found(call: Call, project: Path) -> None:
    """Without findings the exit code is 0."""
    assert call("lint", "clean.py").code == 0
    assert call("lint", "train.py", "--ignore", "AMP108,AMP301").code == 0
    assert call("lint", "train.py", "--select", "amp2").code == 0
    assert call("lint", ".", "--exclude", "train.py", "--exclude", "old.py").code == 0


def test_fix(call: Call, project: Path) -> None:
    """What can be corrected is, in the file; the rest is reported."""
    done = call("lint", "--fix", "train.py")

    assert (project / "train.py").read_text(encoding="utf-8") == FIXED
    assert done.code == 1
    assert done.out.startswith("train.py:1:1: AMP301 ")
    assert done.lines == ["1 finding fixed; 1 finding in 1 of 1 file"]
    assert call("lint", "--fix", "--ignore", "AMP301", "train.py").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "ampcompare: not read: missing.py: No such file or directory"),
        ([".", "--select", "AMP9"], "ampcompare: no lint code begins with 'AMP9'; "),
        ([], "Missing argument"),
    ],
)
def test_usage(call: Call, project: Path, arguments: list[str], message: str) -> None:
    """A path that does not exist and an unknown code end in one line and exit code 2."""
    done = call("lint", *arguments)

    assert done.code == 2
    assert message in done.err
