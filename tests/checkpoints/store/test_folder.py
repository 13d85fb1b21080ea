"""The checkpoints of one run in one folder, and saving in the background."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import CheckpointError, EnvironmentUnfit
from ampcompare.checkpoints.store import folder as folder_module
from ampcompare.checkpoints.store.file import read_checkpoint, write_checkpoint
from ampcompare.checkpoints.store.folder import CheckpointFolder
from ampcompare.settings.config import SavingConfig
from ampcompare.training.checkpoint.saver import CheckpointSaver, RunPosition

Make = Callable[..., dict[str, Any]]


def value_of(state: dict[str, Any]) -> float:
    return float(state["model"]["weight"][0, 0])


def test_the_last_and_the_best_stay(tmp_path: Path, make_state: Make) -> None:
    """Of five checkpoints the last two stay, and the best under its own name, though its step is gone."""
    folder = CheckpointFolder(tmp_path, keep_last=2)
    assert folder.read_newest_path_state_and_notes() is None
    for step in range(1, 6):
        assert folder.save(make_state(step), step=step, best=step == 2) == tmp_path / f"step-{step:08d}.pt"
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "step-00000004.pt", "step-00000005.pt"]
    assert value_of(read_checkpoint(tmp_path / "best.pt")) == 2
    found = folder.read_newest_path_state_and_notes()
    assert found is not None
    path, state, notes = found
    assert (path.name, value_of(state), notes) == ("step-00000005.pt", 5.0, [])


def test_a_damaged_newest_falls_back_and_says_so(tmp_path: Path, make_state: Make) -> None:
    """Past a truncated and an empty file the one before is found, with a line for each; a save sets them aside."""
    folder = CheckpointFolder(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        folder.save(make_state(step), step=step)
    (tmp_path / "step-00000003.pt").write_bytes(b"")
    os.truncate(tmp_path / "step-00000002.pt", 900)
    found = folder.read_newest_path_state_and_notes()
    assert found is not None
    path, state, notes = found
    assert (path.name, value_of(state)) == ("step-00000001.pt", 1.0)
    assert ["is empty" in notes[0], "is cut off" in notes[1], "falling back" in notes[1]] == [
        True,
        True,
        True,
    ]
    folder.save(make_state(1.5), step=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001.pt", "step-00000002.pt", "step-00000003.pt.aside"]
    found = folder.read_newest_path_state_and_notes()
    assert found is not None
    assert value_of(found[1]) == 1.5


def test_nothing_readable_and_newer_layouts_are_errors(tmp_path: Path, make_state: Make) -> None:
    """A run never starts afresh silently beside checkpoints that it cannot read."""
    folder = CheckpointFolder(tmp_path)
    (tmp_path / "step-00000001.pt").write_text("no")
    with pytest.raises(CheckpointError, match="none of 1 checkpoints"):
        folder.read_newest_path_state_and_notes()
    folder.save(make_state(), step=2)
    write_checkpoint(tmp_path / "step-00000003.pt", {**make_state(), "schema": 99})
    with pytest.raises(CheckpointError, match="upgrade ampcompare"):
        folder.read_newest_path_state_and_notes()


def test_the_best_is_copied_where_there_are_no_links(
    tmp_path: Path, make_state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    CheckpointFolder(tmp_path).save(make_state(3), step=1, best=True)
    assert value_of(read_checkpoint(tmp_path / "best.pt")) == 3


def test_a_failing_write_is_tried_once_more(
    tmp_path: Path, make_state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One refusal is a note, two are an error, and the checkpoint before stays."""
    notes: list[str] = []
    folder = CheckpointFolder(tmp_path, keep_last=1, note=notes.append)
    folder.save(make_state(1), step=1)
    (tmp_path / ".step-00000009.pt.1.tmp").write_bytes(b"left by a killed writer")
    failures = [2]

    def write(path: Path, state: dict[str, Any]) -> None:
        if failures[0]:
            failures[0] -= 1
            raise EnvironmentUnfit(f"cannot write {path}: disk full")
        write_checkpoint(path, state)

    monkeypatch.setattr(folder_module, "write_checkpoint", write)
    with pytest.raises(EnvironmentUnfit, match="disk full"):
        folder.save(make_state(2), step=2)
    assert os.listdir(tmp_path) == ["step-00000001.pt"]
    assert len(notes) == 1
    failures[0] = 1
    folder.save(make_state(3), step=3)
    assert os.listdir(tmp_path) == ["step-00000003.pt"]
    assert "trying once more" in notes[1]


def test_saving_in_the_background(tmp_path: Path, make_state: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save` returns while its checkpoint waits; the next one waits for it; what was saved is the state at the call."""
    go, began = threading.Event(), threading.Event()

    def write(path: Path, state: dict[str, Any]) -> None:
        began.set()
        assert go.wait(20)
        write_checkpoint(path, state)

    monkeypatch.setattr(folder_module, "write_checkpoint", write)
    state = make_state(1)
    first, second = (tmp_path / f"step-0000000{step}.pt" for step in (1, 2))
    with CheckpointSaver(tmp_path, SavingConfig(in_background=True)) as saver:
        saver.save_run_unless_saved(RunPosition(step=1), lambda: state)
        assert began.wait(20)
        assert not first.exists()
        state["model"]["weight"].fill_(9)
        go.set()
        saver.save_run_unless_saved(RunPosition(step=2), lambda: state)
        assert value_of(read_checkpoint(first)) == 1
    assert value_of(read_checkpoint(second)) == 9
