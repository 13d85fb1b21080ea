"""Ranks that a launcher of the script starts by a command of Python run under the settings of the script."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.process import child_processes

PYTHON = sys.executable
SETTINGS = ExecSettings(
    arm="native:bf16", seed=3, max_steps=5, watch=True, record="/cell/script.jsonl", device="cpu"
)
EXEC = ["-m", "ampcompare", "exec", "--engine", "compat"]
OPTIONS = ["--arm", "native:bf16", "--seed", "3", "--max-steps", "5", "--device", "cpu", "--record"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Start nothing, and collect the commands instead."""
    commands: list[list[str]] = []

    def init(process: Any, args: Any, **options: Any) -> None:
        process.returncode = 0
        commands.append(list(args))

    monkeypatch.setattr(subprocess.Popen, "__init__", init)
    monkeypatch.setattr(child_processes, "_started", 0)
    return commands


@pytest.mark.parametrize(
    ("words", "before", "after"),
    [
        (["train.py", "--epochs", "2"], [], ["train.py", "--epochs", "2"]),
        (["-u", "-X", "dev", "train.py"], ["-u", "-X", "dev"], ["train.py"]),
        (["-m", "project.train", "-m"], [], ["-m", "project.train", "-m"]),
    ],
)
def test_a_rank_runs_under_the_arm(
    started: list[list[str]], words: list[str], before: list[str], after: list[str]
) -> None:
    """Its command gets `exec` with the options, and a record of its own; `torchrun` gives a tuple."""
    child_processes.put_exec_before_started_ranks(SETTINGS)
    subprocess.Popen((PYTHON, *words), env={"LOCAL_RANK": "1"})
    assert started == [[PYTHON, *before, *EXEC, *OPTIONS, "/cell/script.started1.jsonl", *after]]
    assert child_processes.num_started_processes() == 1


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        ([PYTHON, "evaluate.py"], None),
        ([PYTHON, "evaluate.py"], {"LOCAL_RANK": "0"}),  # inherited from the rank that starts it
        ([PYTHON, "-c", "print(1)"], {"LOCAL_RANK": "1"}),
        ([PYTHON, "-m", "ampcompare", "exec", "train.py"], {"LOCAL_RANK": "1"}),
        (["nvidia-smi", "-L"], {"LOCAL_RANK": "1"}),
        ([PYTHON], {"LOCAL_RANK": "1"}),
    ],
)
def test_other_commands_stay_as_they_are(
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    environment: dict[str, str] | None,
) -> None:
    """A program that is no rank, or no script of Python, is the script's own business."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    child_processes.put_exec_before_started_ranks(SETTINGS)
    subprocess.Popen(command, env=environment)
    assert started == [command]
    assert child_processes.num_started_processes() == 0


def test_ranks_of_a_legacy_script_have_its_options(started: list[list[str]]) -> None:
    """What `exec` was asked for reaches each rank: of a twin, all have the same weights."""
    child_processes.put_exec_before_started_ranks(
        ExecSettings(opt_level="O2", twin=True, compat_torch=True, guards="strict")
    )
    subprocess.Popen([PYTHON, Path("train.py")], env={"LOCAL_RANK": "0"})
    assert started == [
        [PYTHON, *EXEC, "--opt-level", "O2", "--twin", "--compat-torch", "--strict-guards", "train.py"]
    ]


def test_ranks_begin_and_cast_as_the_script_does(started: list[list[str]]) -> None:
    """They have its stored first weights and its lists of autocast; the ledger is shown by one process."""
    child_processes.put_exec_before_started_ranks(
        ExecSettings(arm="fp32", first_weights="/cell/w.pt", autocast_lists="cpu", ledger=True)
    )
    subprocess.Popen([PYTHON, "train.py"], env={"LOCAL_RANK": "0"})
    words = ["--arm", "fp32", "--first-weights", "/cell/w.pt", "--autocast-lists", "cpu"]
    assert started == [[PYTHON, *EXEC, *words, "train.py"]]
