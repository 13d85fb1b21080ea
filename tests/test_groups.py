"""Tests that share a costly fixture run in one process of pytest-xdist, which makes the fixture once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
from pathlib import Path
import pytest

@pytest.fixture(scope="module")
def costly():
    Path(f"made-{os.getpid()}").touch()

@pytest.mark.parametrize("number", range(12))
def test_with(number, costly):
    Path(f"ran-{os.getpid()}").touch()

@pytest.mark.parametrize("number", range(12))
def test_without(number):
    Path(f"ran-{os.getpid()}").touch()
"""


@pytest.mark.integration
def test_a_fixture_of_a_module_is_made_in_one_process(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_shared.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "24 passed" in done.stdout
    assert len(list(tmp_path.glob("made-*"))) == 1
    assert len(list(tmp_path.glob("ran-*"))) == 2
