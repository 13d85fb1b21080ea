"""Cells in another environment: under the recorder, by hand, by the ampcompare that is there, and faults of a stack."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.experiment.launch.dispatch.local import LocalLauncher
from ampcompare.experiment.launch.script import stacks
from ampcompare.experiment.launch.script.stacks import (
    StackLauncher,
    copy_recorder,
    current_stack_facts,
    inspect_stack,
    run_script_in_stack,
    write_record_of_recorded_cell,
)
from ampcompare.results.records.run import read_record
from ampcompare.results.records.step import iter_steps
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import script_config
from ampcompare.settings.stack import parse_stacks

pytestmark = pytest.mark.integration

# This Python with its torch, and without ampcompare: packages that are installed for development are not on its path.
BARE = f"env PYTHONPATH={sysconfig.get_paths()['purelib']} {sys.executable} -S"
SCRIPT = """
import sys, time, torch
torch.manual_seed(1)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for k in range(6):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print("loss", repr(loss.item()), flush=True)
"""
ENDS = {
    "kill": "import os; os.kill(os.getpid(), 9)",
    "hang": "time.sleep(600)",
    "fail": "raise ValueError('boom')",
}


@pytest.fixture
def launcher() -> Iterator[StackLauncher]:
    stacks._known.clear()
    with StackLauncher() as launcher:
        yield launcher


def _config(folder: Path, command: str, end: str = "", **settings: Any) -> RunConfig:
    script = folder / "train.py"
    script.write_text(SCRIPT + end)
    stack = parse_stacks({"old": command})["old"]
    metric = ["loss:min=loss ([\\d.]+)"]
    return RunConfig(
        script=script_config([str(script)], metrics=metric), arm="script", stack=stack, **settings
    )


@pytest.mark.slow
def test_a_cell_is_what_its_script_prints(tmp_path: Path, launcher: StackLauncher) -> None:
    config = _config(tmp_path, BARE)
    record = launcher.launch(config, tmp_path / "cell")
    assert record.error is None
    printed = [float(line.split()[1]) for line in (tmp_path / "cell" / "log.txt").read_text().splitlines()]
    assert [step.loss for step in iter_steps(tmp_path / "cell" / "steps.jsonl")] == printed
    assert record.summary.metric_final == pytest.approx(printed[-1])
    assert record.summary.num_steps == 6
    assert record.environment["torch"]
    assert record.environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "ampcompare" not in record.environment
    assert read_record(tmp_path / "cell" / "record.json") == record
    assert not (tmp_path / "cell" / "written").exists()


def test_a_script_by_itself_runs_in_a_stack_without_ampcompare(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The recorder takes the options of `exec` that it has; what it lacks is refused by its flag."""
    config = _config(tmp_path, BARE)
    assert config.script is not None
    assert config.stack is not None
    record = tmp_path / "r.jsonl"
    asked = ExecSettings(arm="script", seed=1, max_steps=2, shift_seeds="global", record=str(record))
    assert run_script_in_stack(config.stack, asked, [config.script.name]) == 0
    assert capfd.readouterr().out.count("loss") == 1  # it ends within the second step
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert sum(row.get("kind") == "step" for row in rows) == 2
    for field, value in {"twin": True, "ledger": True, "device": "cpu", "shift_seeds": "all"}.items():
        settings = dataclasses.replace(asked, **{field: value})
        with pytest.raises(UnsupportedCombination, match=f"^--{field.replace('_', '-')} needs ampcompare "):
            run_script_in_stack(config.stack, settings, [config.script.name])
    with pytest.raises(UnsupportedCombination, match="arm apex:O2 needs ampcompare"):
        run_script_in_stack(config.stack, dataclasses.replace(asked, arm="apex:O2"), [config.script.name])


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 3])
def test_a_cell_begins_with_the_first_weights_of_another_stack(width: int, tmp_path: Path) -> None:
    """That stack makes other weights; where they have another shape, the cell is a row with its reason."""
    config = _config(tmp_path, BARE)
    assert config.script is not None
    source = SCRIPT.replace("manual_seed(1)", 'manual_seed(int(__import__("os").environ.get("SEED", 1)))')
    source = source.replace(
        "Linear(4, 2)", f'Linear(4, {width} if "SEED" in __import__("os").environ else 2)'
    )
    Path(config.script.name).write_text(source)
    other = parse_stacks({"other": f"env SEED=9 {BARE.removeprefix('env ')}"})["other"]
    begun = config.model_copy(update={"script": config.script.model_copy(update={"first_weights": other})})
    with LocalLauncher() as launcher:
        record = launcher.launch(begun, tmp_path / "cells" / "begun")
        theirs = launcher.launch(begun.model_copy(update={"stack": other}), tmp_path / "cells" / "theirs")
        own = launcher.launch(config, tmp_path / "cells" / "own")
    assert theirs.script is not None
    assert own.script is not None
    if width == 2:
        assert record.script is not None
        assert record.script.weights == theirs.script.weights != own.script.weights
    else:
        assert "the stored first weights do not fit one of shape [2, 4]" in str(record.error)
    assert len(list((tmp_path / "first-weights").glob("*/first.pt"))) == 1


RANKS = """
import os, torch
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
torch.manual_seed(int(os.environ.get("SEED", 1)) + torch.distributed.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for k in range(3):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["there", "here"])
def test_ranks_begin_with_the_first_weights_of_another_stack(place: str, tmp_path: Path) -> None:
    """Of its rank 0, all of them: under the recorder, and under an arm of ampcompare."""
    config = _config(tmp_path, BARE, processes=2)
    assert config.script is not None
    Path(config.script.name).write_text(RANKS)
    other = parse_stacks({"other": f"env SEED=9 {BARE.removeprefix('env ')}"})["other"]
    script = script_config([config.script.name])
    begun = config.model_copy(update={"script": script.model_copy(update={"first_weights": other})})
    if place == "here":
        begun = begun.model_copy(update={"stack": None, "arm": "fp32"})
    with LocalLauncher() as launcher:
        record = launcher.launch(begun, tmp_path / "cells" / "begun")
        theirs = launcher.launch(
            begun.model_copy(update={"stack": other, "arm": "script"}), tmp_path / "cells" / "theirs"
        )
    assert record.error is None
    assert record.script is not None
    assert theirs.script is not None
    assert record.script.weights == theirs.script.weights
    files = sorted((tmp_path / "cells" / "begun").glob("script*.jsonl"))
    hashes = [json.loads(line).get("sha256") for file in files for line in file.read_text().splitlines()[1:]
              if json.loads(line)["kind"] == "weights"]  # fmt: skip
    assert len(files) == 2
    assert hashes
    assert all(one in theirs.script.weights for one in hashes)


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_script_that_fails_there_is_a_record(end: str, tmp_path: Path, launcher: StackLauncher) -> None:
    config = _config(tmp_path, BARE, ENDS[end], stall_timeout=20.0 if end == "hang" else 300.0)
    record = launcher.launch(config, tmp_path / "cell")
    assert record.status == "failed"
    expected = {"kill": "SIGKILL", "hang": "hangs in the stack old", "fail": "ValueError: boom"}[end]
    assert expected in str(record.error)
    steps = len(list(iter_steps(tmp_path / "cell" / "steps.jsonl")))
    assert steps == 6


@pytest.mark.slow
def test_processes_that_a_script_starts_are_named_as_not_recorded(
    tmp_path: Path, launcher: StackLauncher
) -> None:
    config = _config(tmp_path, BARE)
    body = textwrap.indent(SCRIPT, "    ")
    start = "import torch.multiprocessing as mp\nif __name__ == '__main__': mp.spawn(train, nprocs=1)\n"
    (tmp_path / "train.py").write_text(f"def train(rank):\n{body}\n{start}")
    record = launcher.launch(config, tmp_path / "cell")
    assert str(record.error).startswith(
        "the script ended with exit code 0, but made no optimizer step; the recorder"
    )
    assert "let torchrun start them, with --nproc-per-node" in str(record.error)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("/no/such/python", "cannot be started: /no/such/python: No such file or directory"),
        ("false", "cannot be started: false ended with exit code 1"),
        (f"{sys.executable} -I -S", "has no torch that can be imported: ModuleNotFoundError"),
        ("sh -c 'exec sleep 600' python", "does not answer"),
    ],
)
def test_a_stack_that_cannot_train_is_a_record(
    command: str, reason: str, tmp_path: Path, launcher: StackLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "START_SECONDS", 2.0 if "sleep" in command else 100.0)
    config = _config(tmp_path, command)
    record = launcher.launch(config, tmp_path / "cell")
    assert record.status == "failed"
    assert reason in str(record.error)


@pytest.mark.parametrize("lacks", ["", "pydantic", "xxhash"])
def test_an_ampcompare_that_cannot_train_there_does_not_count(lacks: str, tmp_path: Path) -> None:
    """As where its files are on a path that another Python inherits, without what it needs."""
    stacks._known.clear()
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{lacks!r}] = None" if lacks else "")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    stack = parse_stacks({"old": f"env PYTHONPATH={path} {sys.executable}"})["old"]
    copy_recorder(tmp_path)
    found = inspect_stack(stack, tmp_path)
    assert found.fault == ""
    assert found.facts["torch"]
    assert found.has_this_ampcompare == (not lacks)


@pytest.mark.slow
def test_only_the_script_as_written_trains_without_ampcompare(
    tmp_path: Path, launcher: StackLauncher
) -> None:
    config = _config(tmp_path, BARE).model_copy(update={"arm": "native:bf16"})
    record = launcher.launch(config, tmp_path / "cell")
    assert "the stack old has no ampcompare: only the arm script" in str(record.error)


@pytest.mark.slow
def test_any_arm_trains_by_the_ampcompare_of_the_stack(tmp_path: Path, launcher: StackLauncher) -> None:
    config = _config(tmp_path, sys.executable).model_copy(update={"arm": "native:bf16"})
    record = launcher.launch(config, tmp_path / "cell")
    assert record.error is None
    assert record.config == config
    assert record.cell == config.digest()
    assert record.ledger is not None  # which the recorder does not have


@pytest.mark.slow
def test_a_cell_that_was_recorded_by_hand_is_taken_up(tmp_path: Path, launcher: StackLauncher) -> None:
    config = _config(tmp_path, "/no/such/python")
    cell = tmp_path / "cell"
    record = launcher.launch(config, cell)
    assert "by-hand.txt" in str(record.error)
    away = shutil.copytree(cell, tmp_path / "away")
    line = next(line for line in (cell / "by-hand.txt").read_text().splitlines() if "recorder.py" in line)
    words = line.split("|")[0].split()[1:]
    words[0] = str(away / "recorder.py")
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    (cell / "script.jsonl").write_text((away / "script.jsonl").read_text())
    (cell / "log.txt").write_text(done.stdout)
    write_record_of_recorded_cell(config, cell)
    taken = read_record(cell / "record.json")
    assert taken.status == "completed"
    assert taken.summary.num_steps == 6
    assert taken.summary.metric_final == pytest.approx(float(done.stdout.split()[-1]))
    before = (cell / "record.json").read_text()
    write_record_of_recorded_cell(config, cell)  # once
    assert (cell / "record.json").read_text() == before


@pytest.mark.slow
def test_rows_of_another_script_are_not_taken_up(tmp_path: Path, launcher: StackLauncher) -> None:
    config = _config(tmp_path, BARE)
    cell = tmp_path / "cell"
    launcher.launch(config, cell)
    (cell / "record.json").unlink()
    notes: list[str] = []
    write_record_of_recorded_cell(_config(tmp_path, BARE, "print()"), cell, notes.append)
    assert not (cell / "record.json").exists()
    assert "another script" in notes[0]
    write_record_of_recorded_cell(_config(tmp_path, BARE), cell, notes.append)
    assert (cell / "record.json").exists()


@pytest.mark.slow
def test_what_a_stack_has_now_is_asked_once(tmp_path: Path, launcher: StackLauncher) -> None:
    config = _config(tmp_path, BARE)
    facts = current_stack_facts(config)
    assert facts["torch"]
    os.rename(tmp_path / "train.py", tmp_path / "other.py")
    assert current_stack_facts(config) == facts


@pytest.mark.slow
def test_ranks_are_those_of_torchrun_there(tmp_path: Path, launcher: StackLauncher) -> None:
    config = _config(tmp_path, BARE, processes=2)
    script = Path(config.script.name) if config.script is not None else Path()
    script.write_text(
        script.read_text().replace("model = ", "torch.distributed.init_process_group('gloo')\nmodel = ")
    )
    config = config.model_copy(update={"script": script_config([str(script)])})
    record = launcher.launch(config, tmp_path / "cell")
    assert record.error is None
    rows = [json.loads(line) for line in (tmp_path / "cell" / "script.jsonl").read_text().splitlines()]
    assert {"kind": "rank", "rank": 0, "world_size": 2} in rows
    assert (tmp_path / "cell" / "script.rank1.jsonl").exists()
