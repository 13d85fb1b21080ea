"""What killed processes leave in a run directory, and disks that are full."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.experiment.launch.cell_files import remove_temporary_files
from ampcompare.experiment.launch.worker import cell
from ampcompare.experiment.launch.worker.cell import JsonLineFile, record_of_failure
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize(
    "place", ["", "cells/0123456789ab", "cells/0123456789ab/checkpoints", "verify-resume/resumed"]
)
@pytest.mark.parametrize("name", [".env.json.{}.tmp", ".step-00000002.pt.{}.tmp", ".rendezvous.{}.x_9"])
def test_leftovers_go(tmp_path: Path, dead: int, place: str, name: str) -> None:
    """The next command on a run directory removes what a killed process was writing or had met by, wherever it lies."""
    left = tmp_path / place / name.format(dead)
    left.parent.mkdir(parents=True, exist_ok=True)
    if "rendezvous" in name:
        left.mkdir()
        (left / "store").write_text("")
    else:
        left.write_text("half a f")
    remove_temporary_files(tmp_path)
    assert not left.exists()


def test_what_is_in_use_stays(tmp_path: Path, dead: int) -> None:
    """Files of processes that live, of jobs on other machines, and those that only look alike are left alone."""
    job = tmp_path / "cells" / "0123456789ab"
    job.mkdir(parents=True)
    (job / "job.json").write_text("{}")
    kept = [
        tmp_path / f".env.json.{os.getpid()}.tmp",
        job / f".progress.json.{dead}.tmp",
        tmp_path / "notes.tmp",
    ]
    kept += [
        tmp_path / "cells" / "b" / "node1" / f".a.{dead}.tmp",
        tmp_path / ".draft.tmp",
        tmp_path / "elsewhere" / f".a.{dead}.tmp",
    ]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / f".rendezvous.{os.getpid()}.x").mkdir()
    remove_temporary_files(tmp_path)
    assert [path for path in kept if not path.exists()] == []
    assert (tmp_path / f".rendezvous.{os.getpid()}.x").exists()
    old = time.time() - 7200
    os.utime(kept[1], (old, old))
    remove_temporary_files(tmp_path)
    assert not kept[1].exists()


STEP = StepRecord(0, 0, 1.0, (), (), (True,), None, 0.1, 0.1)


def test_steps_that_are_taken_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that the system takes in parts is written whole."""
    with JsonLineFile(tmp_path / "steps.jsonl") as steps:
        whole: Any = steps._file
        monkeypatch.setattr(
            steps, "_file", type("Slow", (), {"write": lambda self, text: whole.write(text[:3])})()
        )
        steps.write([STEP, STEP])
        monkeypatch.setattr(steps, "_file", whole)
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_elsewhere(make_config: MakeConfig, number: int) -> None:
    """A write of a user's code, or of torch, that finds no room has the same exit code and remedy."""
    record = record_of_failure(make_config(), OSError(number, os.strerror(number), "/data/x"))
    assert record.environment["exit_code"] == 4
    assert (
        record.error == "no space is left on the disk for /data/x; free some or choose another --output-dir"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_ends_a_cell(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell whose steps cannot be written is a record with the exit code of an unfit environment."""
    monkeypatch.setattr(
        cell,
        "_keep_files_up_to_resume_point",
        lambda folder, *_: (folder / "steps.jsonl").symlink_to("/dev/full"),
    )
    record = cell.train_cell_and_write_record(make_config(), tmp_path)
    assert record.environment["exit_code"] == 4, record.error
    assert "No space left on device; free some space" in (record.error or "")
