"""Records, to and from strict JSON; files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from ampcompare.base.errors import EnvironmentUnfit, RecordError
from ampcompare.base.files.write import write_atomically
from ampcompare.results.records.comparison import read_comparison
from ampcompare.results.records.document import SCHEMA
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.run import (
    EngineInfo,
    Resumption,
    RunRecord,
    RunSummary,
    StepRecord,
    dump_json,
    read_record,
)
from ampcompare.results.records.step import iter_steps
from ampcompare.settings.config import RunConfig

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
AMOUNT = st.floats(0, 1e12, exclude_max=True)
COUNT = st.integers(0, 2**53)
TEXT = st.text(max_size=30)
PLAIN = st.none() | st.booleans() | COUNT | FINITE | TEXT

EPOCHS = st.builds(
    EpochResult, epoch=COUNT, samples=st.integers(1, 100), top1_correct=COUNT, top5_correct=COUNT, loss=ANY_FLOAT,
    train_seconds=AMOUNT, eval_seconds=AMOUNT,
)  # fmt: skip
SUMMARIES = st.builds(
    RunSummary, epochs=st.lists(EPOCHS, max_size=3), metric_final=st.none() | st.floats(0, 1),
    loss_final=st.none() | ANY_FLOAT, final_loss_scale=st.none() | ANY_FLOAT, peak_bytes=st.none() | COUNT,
    diverged_step=st.none() | COUNT, divergence=st.none() | TEXT,
)  # fmt: skip
RECORDS = st.builds(
    RunRecord,
    cell=TEXT,
    arm=TEXT,
    status=st.sampled_from(["completed", "diverged", "failed", "interrupted"]),
    config=st.builds(RunConfig, arm=st.sampled_from(["fp32", "half", "native:bf16"])),
    engine=st.none() | st.builds(EngineInfo, name=st.sampled_from(["nvidia", "compat"]), version=TEXT, reason=TEXT),
    environment=st.dictionaries(TEXT, PLAIN, max_size=3),
    summary=SUMMARIES,
    error=st.none() | TEXT,
)
SCALES = st.lists(ANY_FLOAT, max_size=2).map(tuple)
STEPS = st.builds(
    StepRecord, step=COUNT, epoch=COUNT, loss=ANY_FLOAT, loss_scales_before=SCALES, loss_scales=SCALES,
    applied=st.lists(st.booleans(), max_size=2).map(tuple), grad_norm=st.none() | ANY_FLOAT, seconds=FINITE,
    data_seconds=FINITE,
)  # fmt: skip


def strict(text: str) -> Any:
    """Parse JSON as the standard has it: without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def same(one: Any, other: Any) -> bool:
    """Tell whether two values are equal, NaN being equal to NaN."""
    if isinstance(one, BaseModel):
        return type(one) is type(other) and same(dict(one), dict(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return bool(one == other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the files of all examples of one test."""
    return tmp_path_factory.mktemp("records")


@settings(deadline=None, max_examples=50)
@given(record=RECORDS)
@pytest.mark.integration
def test_record_round_trip(folder: Path, record: RunRecord) -> None:
    """Any record, with nan, inf and odd texts, is the same after writing and reading, and its file is strict JSON."""
    path = folder / "record.json"
    path.write_text(dump_json(record), encoding="utf-8")
    assert strict(path.read_text(encoding="utf-8"))["schema"] == SCHEMA
    assert same(read_record(path), record)


@settings(deadline=None, max_examples=50)
@given(steps=st.lists(STEPS, max_size=4))
@pytest.mark.integration
def test_steps_round_trip(folder: Path, steps: list[StepRecord]) -> None:
    """Steps are the same after writing them line by line, each line strict JSON."""
    path = folder / "steps.jsonl"
    lines = [dump_json(step, indent=None) for step in steps]
    assert all(isinstance(strict(line), dict) for line in lines)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert same(list(iter_steps(path)), steps)


def test_non_finite_numbers_are_words() -> None:
    """JSON has no nan and inf, so they are written as three agreed strings, wherever they stand."""
    text = dump_json({"a": math.nan, "b": [math.inf, (-math.inf,)], "c": 1.5}, indent=None)
    assert text == '{"a": "nan", "b": ["inf", ["-inf"]], "c": 1.5}'


def test_json_is_plain_ascii() -> None:
    """Characters that could steer a terminal, or cannot be encoded, are escaped."""
    text = dump_json({"name": "\x1b[2J\x9b31m\u202e\ud800é"})
    assert text.isascii()
    assert text.replace("\n", "").isprintable()


def _write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


GOOD = json.loads(dump_json(RunRecord(cell="c", arm="fp32", status="completed", config=RunConfig())))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (dump_json(GOOD)[:-20], "is not a run record: not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "nested deeper than 64 levels"),
        (b"\xff\xfe\x00", "it is not text"),
        ("[1, 2]", "it has no schema number"),
        ("{}", "it has no schema number"),
        (json.dumps({**GOOD, "schema": "1"}), "it has no schema number"),
        (json.dumps({**GOOD, "schema": SCHEMA + 1}), f"has schema {SCHEMA + 1}, .* reads up to {SCHEMA}; upgrade"),
        (json.dumps({**GOOD, "status": "fine"}), "status: Input should be 'completed'"),
        (json.dumps({name: value for name, value in GOOD.items() if name != "cell"}), "cell: Field required"),
        (json.dumps({**GOOD, "config": {"arm": "apex:02"}}), "this version refuses its config.arm: .*write O2"),
        (
            json.dumps({**GOOD, "arm": "half:shadow", "config": {"arm": "half:shadow"}}),
            "this version refuses its config.arm: backend 'half' has no option 'shadow'",
        ),
        (json.dumps({**GOOD, "summary": {"loss_final": "large"}}), "summary.loss_final"),
    ],
)
def test_a_record_that_cannot_be_read(tmp_path: Path, content: str | bytes, message: str) -> None:
    """A file that is no record is refused in one line that names it and says what is wrong."""
    path = _write(tmp_path / "record.json", content)
    with pytest.raises(RecordError, match=message) as caught:
        read_record(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_record_that_is_not_there(tmp_path: Path) -> None:
    """A missing file is told as such."""
    with pytest.raises(RecordError, match=r"cannot read run record .*: No such file"):
        read_record(tmp_path / "record.json")


def test_a_record_is_not_a_comparison(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is not a comparison: command: Field required"):
        read_comparison(_write(tmp_path / "record.json", dump_json(GOOD)))


def test_fields_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    """A field that this version does not know does not make a record of its schema unreadable."""
    read = read_record(_write(tmp_path / "record.json", json.dumps({**GOOD, "mood": "good"})))
    assert read.arm == "fp32"
    assert not hasattr(read, "mood")


STEP = dump_json(StepRecord(0, 0, 1.0, (), (), (True,), None, 0.1, 0.0), indent=None)


def test_a_last_line_that_was_cut_off(tmp_path: Path) -> None:
    """Steps written before a process was killed are readable; half a line ends them."""
    path = _write(tmp_path / "steps.jsonl", f"{STEP}\n{STEP}\n{STEP[:30]}")
    assert len(list(iter_steps(path))) == 2


@pytest.mark.parametrize("line", ["{}", "[]", "3", STEP[:30], STEP.replace("1.0", '"large"')])
def test_a_line_that_is_no_step(tmp_path: Path, line: str) -> None:
    """A damaged line before the last is an error that says which."""
    path = _write(tmp_path / "steps.jsonl", f"{STEP}\n{line}\n{STEP}\n")
    with pytest.raises(RecordError, match="line 2, is not a step record"):
        list(iter_steps(path))


def test_write_makes_the_folder_and_replaces(tmp_path: Path) -> None:
    """Folders are made, the new text is there, and nothing else is left behind."""
    path = tmp_path / "a" / "b" / "file.json"
    write_atomically(path, "old")
    write_atomically(path, "new ±")
    assert path.read_text(encoding="utf-8") == "new ±"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full the old file is still whole, no half file lies beside it, and the remedy is named."""
    path = tmp_path / "record.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentUnfit, match="No space left on device; free some space or choose another"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A path below a regular file cannot be written, and says so."""
    (tmp_path / "FILE").write_text("")
    with pytest.raises(EnvironmentUnfit, match=r"cannot write .*FILE"):
        write_atomically(tmp_path / "FILE" / "sub" / "x.json", "text")


def test_written_files_have_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    """A report that others should read is not hidden from them by the way it is written."""
    (tmp_path / "plain.txt").write_text("text")
    write_atomically(tmp_path / "atomic.txt", "text")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes["atomic.txt"] == modes["plain.txt"]


def test_older_resumptions_name_the_machine_in_notes() -> None:
    """What a step takes depends on torch and the machine, and on no other version or number of processes."""
    notes = ["torch 1.13.1 then, 2.13.0 now", "host a then, b now", "numpy 1 then, 2 now", "2 processes then, 1 now: x"]
    assert Resumption(step=3, notes=notes).machine == notes[:2]
    assert Resumption(step=3, notes=notes, machine=[]).machine == []
