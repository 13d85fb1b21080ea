"""Processes that Open MPI's mpirun starts join as ranks, as those of torchrun do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ampcompare.results.records.run import RunRecord, read_record

SIZE = ["--max-steps", "3", "--train-size", "64", "--val-size", "32", "-b", "8", "-a", "mlp"]
OPTIONS = ["--backend", "apex", "--opt-level", "O2", "--device", "cpu", *SIZE]
MPIRUN = ["mpirun", *(["--allow-run-as-root"] if os.getuid() == 0 else []), "--oversubscribe", "-n", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def _run(command: list[str], folder: Path) -> RunRecord:
    done = subprocess.run([*command, *OPTIONS, "-o", str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_record(next(folder.glob("cells/*/record.json")))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI (Debian: openmpi-bin)")
def test_the_record_is_that_of_torchrun(tmp_path: Path) -> None:
    """Two ranks of mpirun train what two ranks of torchrun train, to the last bit."""
    ours = [sys.executable, "-m", "ampcompare", "run"]
    joined = _run([*MPIRUN, *ours], tmp_path / "mpirun")
    started = _run([*TORCHRUN, *ours[1:]], tmp_path / "torchrun")
    assert joined.summary.losses_sha256 == started.summary.losses_sha256
    assert joined.summary.weights_sha256 == started.summary.weights_sha256
    assert joined.processes is not None
    assert joined.processes.launcher == "mpirun"
    assert joined.processes.world_size == 2
