"""Event files, read back by TensorBoard's own reader."""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import RunRecord, StepRecord, dump_json
from ampcompare.results.report.tensorboard import EventFiles, run_name
from ampcompare.testing import make_comparison, make_record

TAGS = {"train/loss", "train/loss_scale", "train/skipped", "eval/top1", "eval/top5", "eval/loss", "time/step_seconds"}


def _step(number: int, *, scale: float | None, applied: bool = True, loss: float = 2.0) -> StepRecord:
    scales = () if scale is None else (scale,)
    return StepRecord(number, 0, loss - number, scales, scales, (applied,), None, 0.25, 0.05)


def _lay(folder: Path, record: RunRecord, steps: Sequence[StepRecord], ended: float = 1_700_000_000.0) -> Path:
    path = folder / "cells" / record.cell / "steps.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(dump_json(step._asdict(), indent=None) + "\n" for step in steps))
    os.utime(path, (ended, ended))
    return path


def _compared(records: Sequence[RunRecord]) -> Comparison:
    arms = list(dict.fromkeys(record.arm for record in records))
    return make_comparison(records, arms=arms)


def _read(run: Path) -> Any:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    return reader.EventAccumulator(str(run)).Reload()


def _values(run: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in _read(run).Scalars(tag)]


def test_arms_have_the_same_tags(tmp_path: Path) -> None:
    """A scaled and an unscaled arm have one run each with the same tags, whose values are those of steps and record."""
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    plain, scaled = make_record("fp32", 3, top1=0.4), make_record("apex:O2", 3, top1=0.5)
    _lay(tmp_path / "run", plain, [_step(number, scale=None) for number in range(4)])
    _lay(tmp_path / "run", scaled, [_step(n, scale=2.0 ** (16 - n), applied=n != 1) for n in range(4)])
    EventFiles(tmp_path / "tb", pytest.fail).write(_compared([plain, scaled]), tmp_path / "run")
    runs = {path.parent.relative_to(tmp_path / "tb").as_posix() for path in (tmp_path / "tb").rglob("*tfevents*")}
    assert runs == {"fp32/seed=3", "apex-O2/seed=3"}
    for run in runs:
        assert set(_read(tmp_path / "tb" / run).Tags()["scalars"]) == TAGS
    one, other = tmp_path / "tb" / "fp32" / "seed=3", tmp_path / "tb" / "apex-O2" / "seed=3"
    assert _values(one, "train/loss") == [(0, 2.0), (1, 1.0), (2, 0.0), (3, -1.0)]
    assert [value for _, value in _values(one, "train/loss_scale")] == [1.0] * 4
    assert [value for _, value in _values(other, "train/loss_scale")] == [65536.0, 32768.0, 16384.0, 8192.0]
    assert [value for _, value in _values(other, "train/skipped")] == [0, 1, 1, 1]
    assert _values(one, "time/step_seconds") == [(number, 0.25) for number in range(4)]
    assert _values(one, "eval/top1") == [(3, pytest.approx(0.4))]
    assert _values(other, "eval/loss") == [(3, 1.0)]


def test_a_cell_that_ran_again_replaces_its_file(tmp_path: Path) -> None:
    """Nothing is written twice for the same steps; newer ones replace the file, and a user's own file stays."""
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    record = make_record("fp32")
    events, folder = EventFiles(tmp_path / "tb", pytest.fail), tmp_path / "tb" / "fp32" / "seed=0"
    _lay(tmp_path / "run", record, [_step(0, scale=None)])
    events.write(_compared([record]), tmp_path / "run")
    (before,) = folder.iterdir()
    stamp = before.stat().st_mtime_ns
    events.write(_compared([record]), tmp_path / "run")
    assert [path.stat().st_mtime_ns for path in folder.iterdir()] == [stamp]
    own = folder / "events.out.tfevents.1.mine"
    own.write_bytes(b"")
    _lay(tmp_path / "run", record, [_step(0, scale=None), _step(1, scale=None)], ended=1_700_000_500.0)
    events.write(_compared([record]), tmp_path / "run")
    assert before not in set(folder.iterdir())
    assert own.exists()
    assert len(list(folder.iterdir())) == 2
    own.unlink()
    assert len(_values(folder, "train/loss")) == 2


def test_a_run_that_failed_or_diverged_has_its_steps(tmp_path: Path) -> None:
    """Steps before a failure are drawn, non-finite losses as such; a cell without steps has no file."""
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    failed, never = make_record("half", status="failed", error="x"), make_record("fp32", status="failed", error="x")
    path = _lay(tmp_path / "run", failed, [_step(0, scale=None), _step(1, scale=None, loss=math.nan)])
    path.write_text(path.read_text() + '{"step": 2, "ep')
    EventFiles(tmp_path / "tb", pytest.fail).write(_compared([never, failed]), tmp_path / "run")
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["half"]
    values = _values(tmp_path / "tb" / "half" / "seed=0", "train/loss")
    assert values[0] == (0, 2.0)
    assert math.isnan(values[1][1])


def test_unreadable_steps_are_a_note(tmp_path: Path) -> None:
    """A broken line in the middle is said once, and the other cells have their files."""
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    bad, good = make_record("half"), make_record("fp32")
    path = _lay(tmp_path / "run", bad, [_step(0, scale=None)])
    path.write_text("nonsense\n" + path.read_text())
    _lay(tmp_path / "run", good, [_step(0, scale=None)])
    notes: list[str] = []
    events = EventFiles(tmp_path / "tb", notes.append)
    for _ in range(2):
        events.write(_compared([good, bad]), tmp_path / "run")
    assert len(notes) == 1
    assert "no event file for half, seed 0: " in notes[0]
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["fp32"]


def test_run_names_are_safe_and_never_shared() -> None:
    """Whatever an arm is called, its run lies right below the log folder, under a short name of its own."""
    labels = ["a:b", "a-b", "a b", "a/b", "../b", "", "..", "\x00\n", "x" * 10_000]
    names = [run_name(label, 0) for label in labels]
    assert len(set(names)) == len(labels)
    assert all(re.fullmatch(r"[\w+][\w.=+-]{0,98}/seed=0", name, re.ASCII) for name in names), names
