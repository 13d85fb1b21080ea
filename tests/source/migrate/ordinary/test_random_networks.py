"""Trainings drawn at random, as `migrate` leaves them: the same output, to the last digit."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from ampcompare.source.migrate.adapter.choice import ORDINARY
from tests.source.migrate.ordinary.random_networks import draw_ordinary_training

EXTENDED = (pytest.mark.extended, pytest.mark.slow)
PRINTED = re.compile(r"(?:loss|norm|evaluation|weights|again) [-\[\d]|\d+$")


def _printed(python: Any, folder: Path) -> list[str]:
    words = ["-W", "ignore", "-m", "ampcompare", "exec", "--no-guards", "--device", "cpu", "train.py"]
    done = python.run(words, folder, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if PRINTED.match(line)]


@pytest.mark.integration
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(each, marks=EXTENDED) for each in range(4, 100))])
def test_a_training_trains_as_the_engine(forked_python: Any, tmp_path: Path, seed: int) -> None:
    """It is rewritten where nothing in its text speaks against that; with an operation of other types it is not."""
    (tmp_path / "train.py").write_text(draw_ordinary_training(seed))
    expected = _printed(forked_python, tmp_path)
    assert len(expected) >= 8
    words = ["-m", "ampcompare", "migrate"]
    said = " ".join(forked_python.run([*words, "train.py"], tmp_path, dict(os.environ)).stderr.split())
    words += ["--rewrite"] if ORDINARY in said else []
    done = forked_python.run([*words, "--write", "train.py"], tmp_path, dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "apex" not in (tmp_path / "train.py").read_text()
    assert (tmp_path / "torch_amp_adapter.py").exists() == (ORDINARY not in said)
    assert _printed(forked_python, tmp_path) == expected
