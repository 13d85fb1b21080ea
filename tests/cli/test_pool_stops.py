"""Cells that run at the same time, stopped in each way: nothing that ended is lost, nothing is left, and it resumes."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ampcompare.results.records.run import read_record

pytestmark = pytest.mark.slow
WORDS = (
    *("compare", "--arm", "fp32,native:bf16", "--data"),
    *("synthetic", "--train-size", "64", "--val-size", "16"),
    *("--image-size", "8", "--arch", "mlp", "--batch-size"),
    *("16", "--device", "cpu", "--no-progress", "--jobs", "2"),
    *("-o", "out"),
)
PATIENCE = 90.0


def _wait_for(condition: Any, process: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)


WAITING = """
import os, time, torch

class Net(torch.nn.Module):
    def __init__(self, num_classes, sample_shape):
        super().__init__()
        self.layer = torch.nn.Linear(sample_shape[0] * sample_shape[1] * sample_shape[2], num_classes)
        print("pid", os.getpid(), flush=True)

    def forward(self, x):
        while self.training and not os.path.exists("go"):
            time.sleep(0.02)
        return self.layer(x.flatten(1))
"""


def test_a_killed_worker_takes_no_other_cell(tmp_path: Path, forked_python: Any) -> None:
    """One of two cells is killed: it is a failed row that says so, and the other ends as if nothing had been."""
    (tmp_path / "waiting.py").write_text(WAITING)
    words = [
        *WORDS,
        "--arch",
        "waiting:Net",
        "--seeds",
        "0",
        "--epochs",
        "1",
        "--no-preflight",
        "--allow-writes",
        ".",
    ]
    process = forked_python.popen([sys.executable, "-m", "ampcompare", *words], cwd=tmp_path)

    def pids() -> list[int]:
        logs = [path.read_text().split() for path in tmp_path.glob("out/cells/*/log.txt")]
        return [int(log[1]) for log in logs if len(log) > 1]

    try:
        _wait_for(lambda: len(pids()) == 2, process)
        os.kill(pids()[0], signal.SIGKILL)
        (tmp_path / "go").touch()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
    records = [read_record(path) for path in tmp_path.glob("out/cells/*/record.json")]
    assert sorted(record.status for record in records) == ["completed", "failed"]
    (failed,) = (record for record in records if record.status == "failed")
    assert "killed by SIGKILL" in (failed.error or "")
    assert json.loads((tmp_path / "out" / "report.json").read_text())["records"]
