"""Standard streams that are closed, and errors that nobody foresaw."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ampcompare
from ampcompare.base.version import NEWEST_TORCH
from ampcompare.cli import main


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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, error: Exception, shown: str
) -> None:
    """What nobody foresaw is one line and exit code 70; the line names a file with the traceback."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("ampcompare.experiment.choices.list_recipes", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["list"]) == 70
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ampcompare: internal error: {shown}")
    found = re.search(r"the details in (\S+)$", line)
    assert found is not None
    assert "Traceback" in Path(found[1]).read_text()
    assert Path(found[1]).parent == tmp_path


def _ask_torch(name: str) -> None:
    """Ask torch for a name as a file of the package does."""
    code = compile(name, str(Path(ampcompare.__file__).with_name("asks.py")), "exec")
    exec(code, {"torch": torch})


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("torch._foreach_no_more", "torch._foreach_no_more"),
        ("torch._C._no_more()", "torch._C._no_more"),
        ("torch.ops.mkldnn._no_more", "torch.ops.mkldnn._no_more"),
        ("from torch.optim.optimizer import _no_more", "torch.optim.optimizer"),
        ("import torch.no_more", "torch.no_more"),
    ],
)
def test_a_name_that_torch_has_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, name: str
) -> None:
    """One line with the name and the way out, and the exit code of an environment."""
    monkeypatch.setattr("ampcompare.experiment.choices.list_recipes", lambda: _ask_torch(code))
    assert main(["list"]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ampcompare: torch {torch.__version__} lacks {name}")
    assert line.endswith('pip install "torch=={}.{}.*" torchvision'.format(*NEWEST_TORCH))


@pytest.mark.parametrize("code", ["ampcompare.no_more", "import torch_no_more"])
def test_another_missing_name_is_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    monkeypatch.setattr("ampcompare.experiment.choices.list_recipes", lambda: _ask_torch(f"import ampcompare; {code}"))
    assert main(["list"]) == 70
    assert "internal error" in capsys.readouterr().err


def test_an_unforeseen_error_without_room_for_details(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where the traceback cannot be written, the line says so."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    monkeypatch.setattr("ampcompare.experiment.choices.list_recipes", lambda: 1 / 0)
    assert main(["list"]) == 70
    assert "ZeroDivisionError: division by zero (no details: " in capsys.readouterr().err


@pytest.mark.parametrize("entry", ["x" * 5000, "/dev/null", "/proc/1/root/none"])
def test_odd_entries_of_the_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], entry: str
) -> None:
    """Entries of `sys.path` that cannot be looked into are passed over, as an import passes over them."""
    monkeypatch.setattr(sys, "path", [entry, *sys.path])
    assert main(["list", "arms"]) == 0
    assert "engine=nvidia" in capsys.readouterr().out


def test_a_deep_run_directory(call: Callable[..., Any], tmp_path: Path) -> None:
    """A run directory a thousand folders deep works; one whose name is too long is refused in one line."""
    deep = os.path.join(str(tmp_path), *["d"] * 1000)
    try:
        assert call("run", "--arch", "mlp", "-o", deep, tiny=True).code == 0
        assert call("report", deep).code == 0
    finally:  # pytest would remove it with one recursion per level
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)
    for words in (["run"], ["run", "--dry-run"], ["compare", "--dry-run"]):
        done = call(*words, "-o", os.path.join(str(tmp_path), *["long" * 10] * 120))
        assert (done.code, len(done.lines)) == (2, 1)
        assert "cannot make the output folder" in done.err
