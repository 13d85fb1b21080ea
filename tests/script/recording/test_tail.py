"""What the recorder of a stack had kept of its last steps belongs to its record."""

import json
import struct
from pathlib import Path
from typing import Any

from ampcompare.experiment.launch.script.rows import read_script_rows
from ampcompare.script.recording.summary import read_exec_record
from ampcompare.script.recording.tail import rows_only_in_tail_file

HEADER = {"format": "ampcompare-exec", "schema": 1, "recorder": 1, "run": "ab12"}


def _step(number: int) -> list[dict[str, Any]]:
    step = {"kind": "step", "optimizer": 0, "step": number, "applied": True}
    return [{"kind": "plain_backward", "loss": 0.5}, {**step, "seconds": None, "lr": 0.1, "grad_norm": None}]


def _record(folder: Path, tail: bytes, *ends: dict[str, Any]) -> Path:
    path = folder / "script.jsonl"
    rows = [HEADER, *_step(0), *_step(1), *ends]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "script.jsonl.ab12.tail").write_bytes(tail)
    return path


def _slot(
    kept: int, step: int, now: float, *, loss: float = 2.0, norm: float = -1.0, day: float | None = None
) -> bytes:
    return struct.pack("=9d", kept, step, 0, loss, now, now + 1000.0 if day is None else day, 0.1, norm, kept)


def test_steps_that_were_not_written_follow_those_that_were(tmp_path: Path) -> None:
    """Slots are used again, so that they stand in another order, and hold steps that are written."""
    path = _record(
        tmp_path, _slot(3, 3, 13.5, norm=4.0) + _slot(1, 1, 11.0) + _slot(2, 2, 12.0, loss=3.0) + bytes(72)
    )
    steps = read_script_rows(path).steps
    assert [(step.loss, step.seconds, step.grad_norm) for step in steps[2:]] == [
        (3.0, 1.0, None),
        (2.0, 1.5, 4.0),
    ]
    assert read_exec_record(path).optimizers[0].steps == len(steps) == 4


def test_a_slot_that_was_cut_off_is_none(tmp_path: Path) -> None:
    torn = _slot(3, 3, 13.0)[:64] + _slot(9, 9, 9.0)[64:]
    assert (
        len(read_script_rows(_record(tmp_path, _slot(2, 2, 12.0) + torn + _slot(4, 4, 14.0)[:50])).steps) == 3
    )


def test_clocks_that_disagree_give_no_time(tmp_path: Path) -> None:
    path = _record(tmp_path, _slot(1, 1, 11.0) + _slot(2, 2, 12.0, day=5.0))
    assert rows_only_in_tail_file(path, [HEADER, *_step(0), *_step(1)])[1]["seconds"] is None


def test_the_tail_of_another_run_is_not_read(tmp_path: Path) -> None:
    path = _record(tmp_path, _slot(2, 2, 12.0))
    assert rows_only_in_tail_file(path, [{**HEADER, "run": "cd34"}]) == []
    assert rows_only_in_tail_file(path, [{**HEADER, "run": "../ab12"}]) == []
    assert rows_only_in_tail_file(path, []) == []
