"""Saving, resuming and verifying by the command line."""

import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.checkpoints.store.folder import CheckpointFolder

Call = Callable[..., Any]
SAVING = ("--log-interval", "1", "--epochs", "2")
TINY = (
    *("--data", "synthetic", "--train-size", "64", "--val-size", "32", "--image-size", "8", "--arch", "mlp"),
    *("--batch-size", "16", "--device", "cpu"),
)


def test_a_run_goes_on_where_it_stopped(call: Call, tmp_path: Path) -> None:
    """The call that is asked to stop exits with 143, and `--resume auto` says from where it went on."""
    words = ("run", "--arm", "apex:O2,engine=compat", *TINY, *SAVING, "-o", str(tmp_path / "out"))
    done = call(*words, "--set", "saving.stop_at_step=3")
    assert done.code == 143
    assert done.out == ""
    assert done.lines[-1] == (
        "ampcompare: apex:O2,engine=compat was asked to stop after 3 updates, and saved; "
        "--resume auto continues from its newest checkpoint"
    )
    done = call(*words, "--resume", "auto")
    assert done.code == 0
    assert "note: resumed from a checkpoint of step 3" in done.lines
    (cell,) = (tmp_path / "out" / "cells").iterdir()
    other = call(
        *("run", "--arm", "native:fp16", *TINY, *SAVING, "-o", str(tmp_path / "other")), "--resume", str(cell)
    )
    assert other.code == 2
    assert "add --convert-on-resume to convert it" in other.lines[-1]
    other = call(
        *("run", "--arm", "native:fp16", *TINY, *SAVING, "-o", str(tmp_path / "other")),
        *("--resume", str(cell), "--convert-on-resume"),
    )
    assert other.code == 0
    assert any("converted from apex:O2,engine=compat" in line for line in other.lines)


def test_the_folder_of_a_run_that_saved(call: Call, tmp_path: Path) -> None:
    """`--resume` takes the folder of a run with one cell; with more it names them, and so does `convert`."""
    words = ("run", "--arm", "fp32", *TINY, *SAVING)
    assert call(*words, "--save-every-epochs", "1", "-o", str(tmp_path / "saved")).code == 0
    done = call(*words, "-o", str(tmp_path / "on"), "--resume", str(tmp_path / "saved"))
    assert done.code == 0
    assert "note: resumed from a checkpoint of step 8" in done.lines
    done = call("convert", str(tmp_path / "saved"), str(tmp_path / "out.pt"), "--to", "apex")
    assert done.code == 2
    assert f"{tmp_path / 'saved'} is a folder" in done.err
    assert "a checkpoint is a file" in done.err
    (cell,) = (tmp_path / "saved" / "cells").iterdir()
    shutil.copytree(cell, cell.with_name("other"))
    done = call(*words, "-o", str(tmp_path / "again"), "--resume", str(tmp_path / "saved"))
    assert done.code == 2
    assert f"holds checkpoints of 2 cells; name one of {cell}" in done.err


def test_what_is_written_beside_a_checkpoint(call: Call, tmp_path: Path) -> None:
    """The layout of an Apex script and the weights alone, where they are asked for; for no other arm the former."""
    words = (*TINY, *SAVING, "--save-every-epochs", "1", "-o", str(tmp_path / "out"), "--async-save")
    done = call(
        *(
            "run",
            "--arm",
            "apex:O2,engine=compat",
            *words,
            "--save-apex-format",
            "--weights-format",
            "safetensors",
        )
    )
    assert done.code == 0
    (folder,) = (tmp_path / "out" / "cells").glob("*/checkpoints")
    legacy = torch.load(folder / "apex-layout.pt", weights_only=True)
    assert set(legacy) >= {"model", "optimizer", "amp", "epoch"}
    assert legacy["epoch"] == 2
    from safetensors.torch import load_file

    weights = load_file(folder / "weights.safetensors")
    found = CheckpointFolder(folder).read_newest_path_state_and_notes()
    assert found is not None
    assert found[1]["progress"]["step"] == 8
    for name, master in found[1]["masters"].items():
        assert torch.equal(weights[name], master)
    done = call("run", *words, "--save-apex-format")
    assert (done.code, done.lines) == (
        2,
        [
            "ampcompare: --save-apex-format needs an arm of Apex: it is what an Apex script saves; leave it out"
        ],
    )


@pytest.mark.slow
def test_a_resumed_run_is_verified(call: Call, tmp_path: Path) -> None:
    """One line says that nothing differs, or one document where that is asked for."""
    words = ("run", *TINY, "--epochs", "2", "-o", str(tmp_path / "out"), "--verify-resume")
    done = call(*words)
    assert done.code == 0
    assert "those of the unbroken run to the last bit" in done.out
    found = call(*words, "--json").json()
    assert (found["steps"], found["difference"]) == (8, "")


def training(folder: Path, cells: int, process: Any) -> None:
    """Wait until so many cells have made a step."""
    deadline = time.monotonic() + 90
    while sum(path.stat().st_size > 0 for path in folder.glob("out/cells/*/steps.jsonl")) < cells:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.slow
def test_sigterm_reaches_all_cells_that_run(tmp_path: Path, forked_python: Any) -> None:
    """Cells that run at the same time all save before the comparison ends."""
    words = ["compare", "--seeds", "0", *TINY, "--arm", "fp32,native:bf16", "--jobs", "2", "--epochs", "5000"]
    process = forked_python.popen([sys.executable, "-m", "ampcompare", *words, "-o", "out"], cwd=tmp_path)
    try:
        training(tmp_path, 2, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
    folders = list(tmp_path.glob("out/cells/*/checkpoints"))
    assert len(folders) == 2
    assert all(CheckpointFolder(folder).read_newest_path_state_and_notes() is not None for folder in folders)


def test_sigterm_reaches_the_cell_of_a_comparison(
    call: Call, tmp_path: Path, forked_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell saves, the comparison ends with 143, and with `--resume auto` the cell goes on."""
    words = ["compare", "--seeds", "0", *TINY, "--arm", "fp32", "--epochs", "5000", "-o", "out"]
    with (tmp_path / "errors").open("w") as errors:
        process = forked_python.popen(
            [sys.executable, "-m", "ampcompare", *words], cwd=tmp_path, stderr=errors
        )
        try:
            training(tmp_path, 1, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
        finally:
            process.kill()
    said = (tmp_path / "errors").read_text()
    assert "Traceback" not in said
    assert "the same command with --resume auto resumes there" in said.splitlines()[-1]
    (folder,) = tmp_path.glob("out/cells/*/checkpoints")
    found = CheckpointFolder(folder).read_newest_path_state_and_notes()
    assert found is not None
    step = found[1]["progress"]["step"]
    monkeypatch.chdir(tmp_path)
    again = call(*words, "--resume", "auto", "--set", f"saving.stop_at_step={step + 4}")
    assert again.code == 143
    assert f"was asked to stop after {step + 4} updates, and saved" in again.lines[-1]
