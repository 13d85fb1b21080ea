"""The documentation against the program: commands exist and are described, and what the README shows runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ampcompare.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NETS = """
import torch

def make_net(num_classes, sample_shape):
    features = 1
    for size in sample_shape:
        features *= size
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(features, num_classes))
"""


def blocks(marker: str) -> list[str]:
    """The code blocks that follow a marker comment."""
    return re.findall(rf"<!-- {marker} -->\n```\w*\n(.*?)```", README, flags=re.DOTALL)


def commands(marker: str) -> list[str]:
    """The lines of those blocks, without remarks."""
    return [line.partition("  #")[0].strip() for block in blocks(marker) for line in block.splitlines() if line.strip()]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, as a user would."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme(name: str) -> None:
    """A command that nobody can find does not exist."""
    assert re.search(rf"`?ampcompare {name}\b", README)


@pytest.mark.slow
@pytest.mark.parametrize("line", commands("run"))
def test_commands_of_the_readme_run(line: str, tmp_path: Path) -> None:
    """Each command ends with exit code 0 and prints something."""
    words = shlex.split(line)
    assert words[0] == "ampcompare"
    done = run([sys.executable, "-m", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("line", commands("run in a folder with mynets.py"))
def test_own_model_of_the_readme_runs(line: str, tmp_path: Path) -> None:
    """A model from the current directory trains by the command that is shown."""
    (tmp_path / "mynets.py").write_text(NETS, encoding="utf-8")
    done = run([sys.executable, "-m", *shlex.split(line)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "native:bf16" in done.stdout


@pytest.mark.parametrize("code", blocks("run as python"))
def test_python_of_the_readme_runs(code: str, tmp_path: Path) -> None:
    """Each Python block works as an unguarded script."""
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    done = run([sys.executable, "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_readme_has_what_is_tested() -> None:
    """The markers still mark something."""
    assert len(commands("run")) >= 3
    assert len(blocks("run as python")) == 2
    assert commands("run in a folder with mynets.py")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_links_of_the_readme_lead_somewhere(path: str) -> None:
    """A relative link names a file or folder of this repository."""
    assert (ROOT / path).exists()
