"""Processes that Open MPI's mpirun starts join as ranks, as those of torchrun do."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.results.records.run import read_record
from tests.distributed.test_run_rank import command, free_port

SIZE = ["--max-steps", "3", "--train-size", "64", "--val-size", "32", "-b", "8", "-a", "mlp"]
OPTIONS = ["--backend", "apex", "--opt-level", "O2", "--device", "cpu", *SIZE]
MPIRUN = ["mpirun", *(["--allow-run-as-root"] if os.getuid() == 0 else []), "--oversubscribe", "-n", "2"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI (Debian: openmpi-bin)")
def test_the_record_is_that_of_torchrun(own_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Two ranks of mpirun train what two ranks of torchrun train, to the last bit."""
    words = ["run", *OPTIONS, "-o"]
    ours = [sys.executable, "-m", "ampcompare", *words, str(tmp_path / "mpirun")]
    done = subprocess.run([*MPIRUN, *ours], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    own_ranks(2, command, folder=str(tmp_path), words=[*words, str(tmp_path / "torchrun")], port=free_port())
    joined, started = (
        read_record(next(tmp_path.glob(f"{launcher}/cells/*/record.json")))
        for launcher in ("mpirun", "torchrun")
    )
    assert joined.summary.losses_sha256 == started.summary.losses_sha256
    assert joined.summary.weights_sha256 == started.summary.weights_sha256
    assert joined.processes is not None
    assert joined.processes.launcher == "mpirun"
    assert joined.processes.world_size == 2
