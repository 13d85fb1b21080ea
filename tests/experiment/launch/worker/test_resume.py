"""Cells that go on from a checkpoint: their files, their record, and what is refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.formatting import format_count
from ampcompare.checkpoints.convert.convert import convert_file
from ampcompare.experiment.launch.cell_files import copy_first_steps
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.launch.forked import ForkedLauncher
from ampcompare.experiment.launch.worker.cell import train_cell_and_write_record
from ampcompare.results.analysis.pairing.comparability import steps_by_other_arm_text
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.results.records.step import iter_steps
from ampcompare.settings.config import RunConfig, SavingConfig

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def cell(make_config: MakeConfig, tmp_path: Path) -> Callable[..., RunRecord]:
    """Train a cell of 8 steps in this process, in the folder of a name."""

    def train(name: str = "cell", *, recipe: dict[str, Any] | None = None, **saving: Any) -> RunRecord:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        config = make_config(
            recipe={"epochs": 2, **(recipe or {})}, drain_every=1, warmup_steps=0, saving=saving
        )
        return train_cell_and_write_record(config, folder)

    return train


Cell = Callable[..., RunRecord]


def test_a_cell_that_was_stopped_goes_on(cell: Cell, tmp_path: Path) -> None:
    """The record says that it was interrupted, then where it went on, and is else that of a cell that was not."""
    first = cell(stop_at_step=3)
    assert (first.status, first.summary.num_steps) == ("interrupted", 3)
    second = cell(resume="auto")
    assert (second.status, [resumption.step for resumption in second.resumed]) == ("completed", [3])
    whole = cell("whole")
    assert second.summary.losses_sha256 == whole.summary.losses_sha256
    assert second.summary.num_steps == whole.summary.num_steps == 8
    assert second.trace is not None
    assert whole.trace is not None
    assert second.trace.losses == whole.trace.losses
    assert [epoch.counts for epoch in second.summary.epochs] == [
        epoch.counts for epoch in whole.summary.epochs
    ]
    steps, others = (
        [(step.step, step.epoch, step.loss) for step in iter_steps(tmp_path / name / "steps.jsonl")]
        for name in ("cell", "whole")
    )
    assert steps == others
    assert read_record(tmp_path / "cell" / "record.json") == second


def test_going_on_in_another_folder_takes_the_steps_along(cell: Cell, tmp_path: Path) -> None:
    """A path names a file or a folder; the steps that were made before are copied from beside it."""
    cell(stop_at_step=5)
    record = cell("other", resume=str(tmp_path / "cell"))
    assert [resumption.step for resumption in record.resumed] == [5]
    assert [step.step for step in iter_steps(tmp_path / "other" / "steps.jsonl")] == list(range(8))
    (tmp_path / "cell" / "steps.jsonl").unlink()
    record = cell("third", resume=str(tmp_path / "cell" / "checkpoints" / "step-00000005.pt"))
    assert record.resumed[0].notes == ["steps.jsonl begins with step 5"]
    assert [step.step for step in iter_steps(tmp_path / "third" / "steps.jsonl")] == [5, 6, 7]
    assert record.summary.num_steps == 8


@pytest.mark.parametrize("converted_first", [False, True])
def test_what_another_arm_trained_stays_known(
    cell: Cell, make_config: MakeConfig, tmp_path: Path, converted_first: bool
) -> None:
    """A run that resumes what fp32 trained says so, also where the checkpoint was converted to a file before."""
    cell(stop_at_step=5)
    path = tmp_path / "cell" / "checkpoints" / "step-00000005.pt"
    saving: dict[str, Any] = {"resume": str(path), "resume_into_other_arm": True}
    if converted_first:
        convert_file(path, tmp_path / "converted.pt", "native")
        saving = {"resume": str(tmp_path / "converted.pt")}
    settings = make_config(
        arm="native:fp16", recipe={"epochs": 2}, drain_every=1, warmup_steps=0, saving=saving
    )
    record = train_cell_and_write_record(settings, tmp_path / "other")
    assert (record.status, record.arm) == ("completed", "native:fp16")
    assert steps_by_other_arm_text(record) == "trained by fp32 for 5 of 8 steps"
    own = cell("own", resume=str(path))
    assert steps_by_other_arm_text(own) == ""


def test_what_is_of_another_run_is_refused(cell: Cell, make_config: MakeConfig, tmp_path: Path) -> None:
    """Another arm or recipe, and no checkpoint at all: one line and the exit code of bad input."""
    cell(stop_at_step=5)
    path = str(tmp_path / "cell" / "checkpoints" / "step-00000005.pt")
    record = cell("other", recipe={"clip_grad": 1.0}, resume=path)
    assert record.error == (
        f"{path} is of another recipe: clip_grad is None there and 1.0 here; "
        "resume with the settings that it was written with"
    )
    assert record.environment["exit_code"] == 2
    config = make_config(arm="native:bf16", recipe={"epochs": 2}, saving={"resume": path})
    assert "was written by fp32, and the arm is native:bf16" in (
        train_cell_and_write_record(config, tmp_path / "other").error or ""
    )
    for name, content in (("empty.pt", b""), ("text.pt", b"no checkpoint")):
        (tmp_path / name).write_bytes(content)
        record = cell("other", resume=str(tmp_path / name))
        assert (record.status, record.environment["exit_code"]) == ("failed", 2)
        assert "\n" not in (record.error or "\n")


def test_a_damaged_newest_checkpoint_is_passed_over(cell: Cell, tmp_path: Path) -> None:
    """The one before it is taken, and the record says so."""
    cell(every_steps=2, stop_at_step=5)
    newest = tmp_path / "cell" / "checkpoints" / "step-00000005.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    record = cell(resume="auto")
    assert (record.status, record.resumed[0].step, record.summary.num_steps) == ("completed", 4, 8)
    assert "step-00000005.pt" in record.resumed[0].notes[0]


def test_sigterm_ends_a_cell_with_a_checkpoint(
    make_config: MakeConfig, launcher: ForkedLauncher, tmp_path: Path
) -> None:
    """A forked cell that is asked to stop saves, and the same cell resumes from there."""
    config = make_config(recipe={"epochs": 5000}, drain_every=1)
    told = []

    def progress(progress: Progress) -> None:
        if progress.steps and not told:
            told.append(launcher.ask_cell_to_stop())

    record = launcher.launch(config, tmp_path, progress)
    assert told == [True]
    assert not launcher.ask_cell_to_stop()
    assert (record.status, record.error) == (
        "interrupted",
        f"asked to stop after {format_count(record.summary.num_steps, 'update')}, and saved",
    )
    again = config.model_copy(
        update={"saving": SavingConfig(resume="auto", stop_at_step=record.summary.num_steps + 2)}
    )
    record = launcher.launch(again, tmp_path)
    assert [step.step for step in iter_steps(tmp_path / "steps.jsonl")] == list(
        range(record.summary.num_steps)
    )
    assert record.resumed[0].step + 2 == record.summary.num_steps


def test_steps_are_kept_up_to_the_checkpoint(tmp_path: Path) -> None:
    """Lines after it go, half a line counts as none, and a file that misses a step is not used."""
    steps = tmp_path / "steps.jsonl"
    steps.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    assert copy_first_steps(tmp_path, [], 2)
    assert steps.read_text() == '{"step": 0}\n{"step": 1}\n'
    assert not copy_first_steps(tmp_path, [], 3)
    assert steps.read_text() == ""
    (tmp_path / "other.jsonl").write_text('{"step": 0}\n{"step": 2}\n')
    assert not copy_first_steps(tmp_path, [tmp_path / "other.jsonl"], 2)


class Disk:
    """What a power cut leaves of a cell: files as they were at their last fsync, under the names they had."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.rows: bytes = b""
        self.at_saves: dict[int, bytes] = {}
        self.fsyncs = 0
        fsync, replace = os.fsync, os.replace

        def note_content(descriptor: int) -> None:
            fsync(descriptor)
            steps = folder / "steps.jsonl"
            if steps.exists() and os.path.samestat(os.fstat(descriptor), steps.stat()):
                self.fsyncs += 1
                self.rows = steps.read_bytes()

        def note_checkpoint(source: Any, target: Any) -> None:
            replace(source, target)
            if Path(target).name.startswith("step-"):
                self.at_saves[int(Path(target).stem.removeprefix("step-"))] = self.rows

        monkeypatch.setattr(os, "fsync", note_content)
        monkeypatch.setattr(os, "replace", note_checkpoint)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_power_cut_leaves_every_row_that_a_checkpoint_counts(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    """When a checkpoint gets its name, the rows up to its step are on the disk, by one fsync for each save."""
    disk = Disk(tmp_path / "cell", monkeypatch)
    cell(every_steps=3, in_background=in_background)
    assert list(disk.at_saves) == [3, 4, 6, 8]
    assert disk.fsyncs == len(disk.at_saves)
    for step, rows in disk.at_saves.items():
        left = tmp_path / f"after-{step}"
        left.mkdir()
        (left / "steps.jsonl").write_bytes(rows)
        assert copy_first_steps(left, [], step)
        assert [row.step for row in iter_steps(left / "steps.jsonl")] == list(range(step))
