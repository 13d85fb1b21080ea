"""A cell as a queue starts it, in a process of its own; and started again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ampcompare.runs.records.run import RunRecord, dump_json, read_record
from ampcompare.runs.records.step import iter_steps
from ampcompare.runs.settings.config import RunConfig

TRAIN = """
import os, signal, sys
from ampcompare.base.errors import Ended
from ampcompare.experiment.launch.slurm_task import train
signal.signal(signal.SIGTERM, lambda *_: print("told to end"))
print("before")
try:
    train(sys.argv[1])
except Ended as error:
    print("code", error.exit_code)
print("after")
os.kill(os.getpid(), signal.SIGUSR2)
"""


def trained(folder: Path, *, stops: bool = False, **variables: str) -> RunRecord:
    command = [sys.executable, "-u", "-c", TRAIN, str(folder)]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    code = "code 143\n" if stops else ""
    assert done.stdout == f"before\n{code}after\ntold to end\n"
    return read_record(folder / "record.json")


@pytest.mark.slow
def test_a_job_that_was_queued_again(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """A first start trains from the beginning, and exits as one that was stopped; a later one of the same job resumes
    from the newest checkpoint, and one after that does nothing."""
    config = make_config("launched:talking", drain_every=1, saving={"stop_at_step": 2})
    (tmp_path / "launched.py").write_text(SPEAKS)
    (tmp_path / "config.json").write_text(dump_json(config))
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    record = trained(tmp_path, stops=True, PYTHONPATH=path, SLURM_RESTART_COUNT="0")
    assert record.status == "interrupted"
    assert "words of the network" in (tmp_path / "log.txt").read_text()
    record = trained(tmp_path, PYTHONPATH=path, SLURM_RESTART_COUNT="1")
    assert (record.status, [resumption.step for resumption in record.resumed]) == ("completed", [2])
    assert [step.step for step in iter_steps(tmp_path / "steps.jsonl")] == [0, 1, 2, 3]
    (tmp_path / "log.txt").unlink()
    assert trained(tmp_path, PYTHONPATH=path, SLURM_RESTART_COUNT="2") == record
    assert not (tmp_path / "log.txt").exists()


SPEAKS = """
import torch

def talking(num_classes, sample_shape):
    print("words of the network")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, num_classes))
"""
