"""Cells under a real Slurm of this machine alone, where it is installed and may be started."""

import subprocess
import sys
from pathlib import Path

import pytest

from ampcompare.results.records.run import read_record

WORDS = [
    *("--data", "synthetic", "--train-size", "64", "--val-size", "33", "--image-size", "8", "--epochs", "1"),
    *("--device", "cpu", "--batch-size", "8", "--no-progress"),
]


def _srun(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = ["srun", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.slow
def test_srun(slurm: dict[str, str], tmp_path: Path) -> None:
    """`srun -n2 ampcompare run` trains over its two tasks and prints one table."""
    run = [sys.executable, "-m", "ampcompare", "run", "--parallel", "apex-ddp", *WORDS, "-o", str(tmp_path)]
    done = _srun(slurm, "-N1", "-n2", *run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("top-1 %") == 1
    record = read_record(next(tmp_path.glob("cells/*/record.json")))
    assert record.processes is not None
    assert (record.processes.world_size, record.processes.launcher) == (2, "slurm")


@pytest.mark.slow
def test_srun_over_two_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    """Tasks on two nodes meet where MASTER_ADDR says, since the names of virtual nodes are no hosts."""
    slurm = {**slurm, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    run = [sys.executable, "-m", "ampcompare", "run", "--parallel", "ddp", *WORDS, "-o", str(tmp_path)]
    done = _srun(slurm, "-N2", "-n2", *run)
    assert done.returncode == 0, done.stderr
    record = read_record(next(tmp_path.glob("cells/*/record.json")))
    assert record.processes is not None
    assert record.processes.nodes == 2
