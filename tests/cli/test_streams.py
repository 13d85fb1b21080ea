"""Standard streams that are closed, and errors that nobody foresaw."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ampcompare
from ampcompare.base.version import NEWEST_TORCH
from ampcompare.cli import main
from ampcompare.experiment.choices import CHOICES


@pytest.mark.parametrize(
    ("closed", "code", "told"),
    [(">&-", 4, "cannot write the output: Bad file descriptor"), ("<&- 2>&-", 0, ""), (">&- 2>&-", 4, "")],
)
def test_closed_streams(tmp_path: Path, closed: str, code: int, told: str) -> None:
    """A closed output is an error in one line; a closed input or error stream changes nothing."""
    command = f"{sys.executable} -m ampcompare list guards {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (code, f"ampcompare: {told}" if told else "")
    assert ("guards" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.parametrize(
    ("error", "shown"),
    [(ZeroDivisionError("two\nlines"), "ZeroDivisionError: two lines"), (MemoryError(), "out of memory"),
     (RecursionError("deep"), "RecursionError: deep"), (AssertionError(), "AssertionError")],
)  # fmt: skip
def test_an_unforeseen_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: Exception,
    shown: str,
) -> None:
    """What nobody foresaw is one line and exit code 70; the line names a file with the traceback."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setitem(CHOICES, "recipes", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["list"]) == 70
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ampcompare: internal error: {shown}")
    found = re.search(r"the details in (\S+)$", line)
    assert found is not None
    assert "Traceback" in Path(found[1]).read_text()
    assert Path(found[1]).parent == tmp_path


def test_characters_that_the_output_cannot_hold(tmp_path: Path) -> None:
    """They are escaped, as in Latin-1 or under a code page of Windows."""
    command = [sys.executable, "-m", "ampcompare", "judge", "--example"]
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, encoding="latin-1", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\u0394" in done.stdout
    assert "±0.5 pp" in done.stdout


def _ask_torch(name: str) -> None:
    """Ask torch for a name as a file of the package does."""
    code = compile(name, str(Path(ampcompare.__file__).with_name("asks.py")), "exec")
    exec(code, {"torch": torch})


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("torch._foreach_no_more", "torch._foreach_no_more"),
        ("torch.ops.mkldnn._no_more", "torch.ops.mkldnn._no_more"),
        ("from torch.optim.optimizer import _no_more", "torch.optim.optimizer"),
    ],
)
def test_a_name_that_torch_has_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, name: str
) -> None:
    """One line with the name and the way out, and the exit code of an environment."""
    monkeypatch.setitem(CHOICES, "recipes", lambda: _ask_torch(code))
    assert main(["list"]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ampcompare: torch {torch.__version__} lacks {name}")
    assert line.endswith('pip install "torch=={}.{}.*" torchvision'.format(*NEWEST_TORCH))
