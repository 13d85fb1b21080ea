"""Records, to and from strict JSON; files that are written whole or not at all."""

import json
import math
import os
from array import array
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import EnvironmentUnfit, RecordError
from ampcompare.base.files.write import write_atomically
from ampcompare.results.records.document import SCHEMA, dump_json
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.run import (
    EngineInfo,
    Resumption,
    RunRecord,
    RunSummary,
    ScriptFacts,
    loss_tail_summary_fields,
    read_record,
)
from ampcompare.results.records.step import StepRecord, iter_steps
from ampcompare.settings.config import RunConfig
from ampcompare.testing import make_record


def strict(text: str) -> Any:
    """Parse JSON as the standard has it: without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


ODD = "\x1b[2J\u202e é"


def test_a_record_and_its_steps_come_back(tmp_path: Path) -> None:
    """With nan, inf and odd texts; files are strict JSON, in which these are words."""
    epoch = EpochResult(
        epoch=0, samples=2, values={"top-1": 0.5}, loss=math.inf, train_seconds=1.0, eval_seconds=0.0
    )
    summary = RunSummary(epochs=[epoch], loss_final=math.inf, final_loss_scale=-math.inf, divergence=ODD)
    engine = EngineInfo(name="compat", version=ODD, reason="")
    record = RunRecord(cell="c", arm=ODD, status="diverged", config=RunConfig(), engine=engine, summary=summary,
                       environment={ODD: [None, True, 2**53, 1e-300]}, error=ODD)  # fmt: skip
    path = _write(tmp_path / "record.json", dump_json(record))
    assert strict(path.read_text())["schema"] == SCHEMA
    assert read_record(path) == record
    steps = [
        StepRecord(0, 0, math.inf, (-math.inf,), (), (True, False), None, 0.1, 0.0, (math.inf, 1.0), 0.1)
    ] * 2
    lines = _write(tmp_path / "steps.jsonl", "".join(f"{dump_json(step, indent=None)}\n" for step in steps))
    assert list(iter_steps(lines)) == steps
    assert (
        dump_json({"a": math.nan, "b": [math.inf, (-math.inf,)]}, indent=None)
        == '{"a": "nan", "b": ["inf", ["-inf"]]}'
    )


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
        (
            json.dumps({**GOOD, "schema": SCHEMA + 1}),
            f"has schema {SCHEMA + 1}, .* reads up to {SCHEMA}; upgrade",
        ),
        (json.dumps({**GOOD, "status": "fine"}), "status: Input should be 'completed'"),
        (json.dumps({name: value for name, value in GOOD.items() if name != "cell"}), "cell: Field required"),
        (
            json.dumps({**GOOD, "config": {"arm": "apex:02"}}),
            "this version refuses its config.arm: .*write O2",
        ),
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


def test_written_files_have_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    """A report that others should read is not hidden from them by the way it is written."""
    (tmp_path / "plain.txt").write_text("text")
    write_atomically(tmp_path / "atomic.txt", "text")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes["atomic.txt"] == modes["plain.txt"]


def test_older_resumptions_name_the_machine_in_notes() -> None:
    """What a step takes depends on torch and the machine, and on no other version or number of processes."""
    notes = [
        "torch 1.13.1 then, 2.13.0 now",
        "host a then, b now",
        "numpy 1 then, 2 now",
        "2 processes then, 1 now: x",
    ]
    assert Resumption(step=3, notes=notes).machine == notes[:2]
    assert Resumption(step=3, notes=notes, machine=[]).machine == []


def test_a_record_that_named_its_library_apart_is_read() -> None:
    ran = {
        "arm": "fp32",
        "library": "accelerate",
        "version": "1.15.0",
        "as_asked": False,
        "reason": "no fp16 here",
    }
    record = RunRecord.model_validate(
        {**GOOD, "arm": "accelerate:fp16", "config": {"arm": "accelerate:fp16"}, "effective": ran}
    )
    assert (record.training_library_text, record.notes) == ("accelerate 1.15.0", ["no fp16 here"])


def test_the_tail_is_the_last_fifth() -> None:
    """The mean is over the last fifth of the steps, rounded down, and over one step at least."""
    assert loss_tail_summary_fields(range(10)) == {"loss_tail": 8.5, "loss_tail_steps": 2}
    assert loss_tail_summary_fields([4.0, 2.0]) == {"loss_tail": 2.0, "loss_tail_steps": 1}
    assert loss_tail_summary_fields(array("d")) == {"loss_tail": None, "loss_tail_steps": 0}
    assert math.isnan(loss_tail_summary_fields([1.0] * 9 + [math.nan])["loss_tail"] or 0.0)


@pytest.mark.parametrize(
    ("arm", "device", "lists"),
    [
        ("native:fp16", "cpu", "cpu"),
        ("native:fp16", "cuda", "cuda"),
        ("fp32", "cpu", "cuda"),
        ("apex:O1", "cpu", "cuda"),
    ],
)
def test_older_records_have_the_lists_that_autocast_used(arm: str, device: str, lists: str) -> None:
    """The CPU's where autocast cast on a CPU; elsewhere the setting changes nothing."""
    record = RunRecord.model_validate(
        {**GOOD, "arm": arm, "config": {"arm": arm}, "environment": {"device": device}}
    )
    assert record.config.autocast_lists == lists


@pytest.mark.parametrize(
    ("environment", "kind"), [({"device": "cuda:1"}, "cuda"), ({"device": "cpu"}, "cpu"), ({}, "cpu")]
)
def test_the_kind_of_its_device(environment: dict[str, str], kind: str) -> None:
    """An old record that does not say ran on a CPU."""
    record = make_record("fp32", 0)
    assert record.model_copy(update={"environment": environment}).device_kind == kind


def test_older_records_name_equal_numbers_in_remarks() -> None:
    """Those of an evaluation, with the place in brackets; a newer record has a field."""
    remark = (
        "of the bf16 numbers that an evaluation compares, 7 % equal what they are compared with (train.py:41)"
    )
    older = {"remarks": ["a sum in bf16 loses 5 % (train.py:3)", remark]}
    assert ScriptFacts.model_validate(older).equal_numbers == ["train.py:41"]
    assert ScriptFacts.model_validate({**older, "equal_numbers": []}).equal_numbers == []
