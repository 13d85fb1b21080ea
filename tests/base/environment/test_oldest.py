"""A Python or torch that is too old is named in one line, whatever is run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampcompare.base.environment.oldest import require_python, require_torch
from ampcompare.base.version import OLDEST_TORCH

MESSAGE = r"needs torch {}\.{} or later, and 2\.5\.1\+cu124 is installed: pip install -U torch"


@pytest.fixture
def torch_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch that is found before the real one; its file `version.py` is still to be written."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return tmp_path / "torch" / "version.py"


@pytest.mark.parametrize(
    "text", ["__version__ = '2.5.1+cu124'\n", 'from typing import Optional\n\n__version__: str = "2.5.1+cu124"\n']
)
def test_an_old_torch(torch_of: Path, text: str) -> None:
    torch_of.write_text(text)
    with pytest.raises(ImportError, match=MESSAGE.format(*OLDEST_TORCH)):
        require_torch()


@pytest.mark.parametrize("version", ["{}.{}.0", "2.10.0a0+git0", "10.0", "", "nightly"])
def test_a_torch_that_will_do(torch_of: Path, version: str) -> None:
    """From the oldest on, and where the file names no numbers: what is not known is not refused."""
    torch_of.write_text(f"__version__ = '{version.format(*OLDEST_TORCH)}'\n")
    require_torch()


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command ends with its line and exit code 4, and an import fails."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(ImportError, match=r"needs Python 3\.\d+ or later, and this is 3\.9\.18"):
        require_python()
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ampcompare", "lint"])
    with pytest.raises(SystemExit) as ended:
        require_python()
    assert ended.value.code == 4


@pytest.mark.integration
@pytest.mark.parametrize("words", [["-m", "ampcompare", "lint", "."], ["-m", "ampcompare", "--version"]])
def test_a_command_is_one_line(torch_of: Path, words: list[str]) -> None:
    torch_of.write_text("__version__ = '2.5.1+cu124'\n")
    path = os.pathsep.join([str(torch_of.parents[1]), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (4, "", 1)
    assert "needs torch" in done.stderr
