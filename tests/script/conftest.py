"""What a script does under an arm, in this process, and scripts in a folder of their own.

`legacy` and `forked` fork a process that has torch loaded, which saves seconds per test; `python` starts the
interpreter, for what has to do with how processes start and end, and with what is imported.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from tests.script.stand_ins import Behind, arms

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: bits must match."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def settled_heap() -> None:
    """Let arms, which look for models among all objects, not look at those of other tests: it is most of their time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def behind() -> Iterator[Behind]:
    """Give `arms` to one test."""
    with arms() as behind:
        yield behind


@pytest.fixture
def script_amp(behind: Behind) -> Callable[[str], Any]:
    """Give the `apex.amp` of an arm."""
    return behind.amp


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file of the script's folder, given its name and indented source."""

    def write_file(name: str, source: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source), encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Run the interpreter in the script's folder."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables},
        )

    return run


@pytest.fixture
def forked(forked_python: Any, tmp_path: Path) -> Run:
    """Run what `python` runs, with torch loaded."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables}
        done: subprocess.CompletedProcess[str] = forked_python.run(list(arguments), tmp_path, environment)
        return done

    return run


@pytest.fixture
def legacy(forked: Run) -> Run:
    """Run `ampcompare exec` with its deprecation warning switched off."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return forked("-W", "ignore::FutureWarning", "-m", "ampcompare", "exec", *arguments, **variables)

    return run
