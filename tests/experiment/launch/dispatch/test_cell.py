"""A cell as a command that any scheduler starts, in a process of its own; and started again."""

import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.experiment.compare import write_cell_commands
from ampcompare.experiment.launch.cell_files import write_cell_inputs
from ampcompare.experiment.launch.dispatch.cell import command_of_cell
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.run_options import CompareOptions
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.results.records.step import iter_steps
from ampcompare.settings.config import RunConfig

MakeConfig = Callable[..., RunConfig]
TINY = {
    "recipe.data.name": "synthetic", "recipe.data.train_size": 64, "recipe.data.val_size": 32, "recipe.epochs": 1,
    "recipe.data.image_size": 8, "recipe.model.arch": "mlp", "recipe.batch_size": 16, "device": "cpu",
}  # fmt: skip


def run(folder: Path, code: int = 0) -> RunRecord:
    done = subprocess.run(command_of_cell(folder), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    return read_record(folder / "record.json")


@pytest.mark.slow
def test_a_command_that_is_started_again(make_config: MakeConfig, tmp_path: Path) -> None:
    """One that was stopped exits as such; the same again resumes from the newest checkpoint, and then does nothing."""
    config = make_config(drain_every=1, saving={"stop_at_step": 2})
    write_cell_inputs(config, tmp_path)
    record = run(tmp_path, code=143)
    assert record.status == "interrupted"
    record = run(tmp_path)
    assert (record.status, [resumption.step for resumption in record.resumed]) == ("completed", [2])
    assert [step.step for step in iter_steps(tmp_path / "steps.jsonl")] == [0, 1, 2, 3]
    (tmp_path / "log.txt").unlink()
    assert run(tmp_path) == record
    assert not (tmp_path / "log.txt").exists()


@pytest.mark.slow
def test_a_command_that_is_killed(
    make_config: MakeConfig, wait_until: Callable[..., bool], user_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """After SIGKILL in the middle of a cell of two ranks the same command ends as one that was not killed."""
    monkeypatch.chdir(user_folder)
    go = tmp_path / "go"
    options = {
        "processes": 2,
        "drain_every": 1,
        "saving": {"every_steps": 1},
        "allow_writes": [str(tmp_path)],
    }
    config = make_config(
        "launched:waits_at_the_third_step", args={"file": str(go)}, recipe={"batch_size": 8}, **options
    )
    for name in ("killed", "whole"):
        write_cell_inputs(config, tmp_path / name)
    with subprocess.Popen(command_of_cell(tmp_path / "killed")) as process:
        assert wait_until(lambda: (tmp_path / "killed/checkpoints/step-00000002.pt").exists(), 120)
        process.send_signal(signal.SIGKILL)
    go.touch()
    killed, whole = run(tmp_path / "killed"), run(tmp_path / "whole")
    assert [each.step for each in killed.resumed] in ([2], [3])  # its ranks may save once more as they end
    assert killed.summary.weights_sha256 == whole.summary.weights_sha256
    losses = [
        [step.loss for step in iter_steps(tmp_path / name / "steps.jsonl")] for name in ("killed", "whole")
    ]
    assert losses[0] == losses[1]


def test_the_commands_of_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell without a record has a line for a shell, whose folder the same comparison reads."""
    monkeypatch.chdir(tmp_path)
    options = CompareOptions(["fp32", "bf16"], seeds="0", output_dir="out dir", **TINY)
    assert write_cell_commands(options, tmp_path / "cells.sh") == 2
    lines = (tmp_path / "cells.sh").read_text().splitlines()
    folders = {shlex.split(line)[-1] for line in lines}
    assert folders == {str(path) for path in (tmp_path / "out dir" / "cells").iterdir()}
    assert all(shlex.split(line)[:3] == ["cd", str(tmp_path), "&&"] for line in lines)
    plan = RunDirectory(tmp_path / "out dir").read_plan()
    assert plan is not None
    assert set(plan.cells.values()) == {os.path.basename(folder) for folder in folders}


def test_what_no_command_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of seeds of "auto", and secrets, are not known when the commands are written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--seeds auto is not for --emit-cells: the first cells decide"):
        write_cell_commands(CompareOptions(seeds="auto", **TINY), tmp_path / "cells.sh")
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError, match="secret among the arguments"):
        write_cell_commands(
            CompareOptions(["fp32"], seeds="0", script=["train.py", "--token", "abcd"]), tmp_path / "cells.sh"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
