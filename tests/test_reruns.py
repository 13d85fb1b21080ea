"""Tests that wait for other processes run once more where they fail, and the summary says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
from pathlib import Path
import pytest

def fails_at_first(name):
    path = Path(name)
    known = path.exists()
    path.touch()
    assert known

@pytest.mark.integration
def test_waits():
    fails_at_first("waits")

@pytest.mark.slow
def test_never_passes():
    assert False

def test_is_not_repeated():
    fails_at_first("computes")
"""


@pytest.mark.integration
def test_what_runs_once_more(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-raR"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "RERUN test_some.py::test_waits" in done.stdout
    assert "2 failed, 1 passed" in done.stdout
    assert "2 rerun" in done.stdout
    assert done.returncode == 1
