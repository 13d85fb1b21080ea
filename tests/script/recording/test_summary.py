"""What is recorded of a GradScaler, and records summed up in every format, without torch."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.base.errors import RecordError
from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.results.report.base import FORMATS
from ampcompare.script.recording.recorder import RecordedSteps, Recorder
from ampcompare.script.recording.scaled_steps import record_grad_scalers
from ampcompare.script.recording.summary import is_exec_record, read_exec_record, record_document

HEADER = {
    "format": "ampcompare-exec",
    "schema": 1,
    "script": "gan.py",
    "engine": "compat",
    "engine_version": "25.05",
}
ROWS = [
    HEADER,
    {
        "kind": "initialize",
        "opt_level": "O2",
        "optimizers": {"0": "SGD"},
        "loss_scales": [4.0],
        "dynamic": [True],
    },
    {
        "kind": "backward",
        "loss": 2.5,
        "loss_id": 0,
        "scale_before": 4.0,
        "scale_after": 8.0,
        "overflow": False,
    },
    {"kind": "step", "optimizer": 0, "applied": True, "seconds": None},
    {
        "kind": "backward",
        "loss": "nan",
        "loss_id": 0,
        "scale_before": 8.0,
        "scale_after": 2.0,
        "overflow": True,
    },
    {"kind": "step", "optimizer": 0, "applied": False, "seconds": 0.5},
    {
        "kind": "backward",
        "loss": 1.5,
        "loss_id": 1,
        "scale_before": None,
        "scale_after": None,
        "overflow": None,
    },
    {"kind": "step", "optimizer": 0, "applied": True, "seconds": 0.25},
    {"kind": "end", "exit_code": 3, "error": None},
]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def _report(record: Path, form: str) -> str:
    return FORMATS[form].make_reporter().document_text(record_document(record))


def test_sums(record: Path) -> None:
    """Steps, skips, overflows, scales, losses and the median step time are those of the rows."""
    summary = read_exec_record(record)
    optimizer, loss, other = summary.optimizers[0], summary.losses[0], summary.losses[1]
    assert (optimizer.name, optimizer.steps, optimizer.skipped, optimizer.median_seconds_without_first) == (
        "SGD",
        3,
        1,
        0.375,
    )
    assert (loss.backwards, loss.overflows, loss.scale_min, loss.scale_max, loss.scale_final) == (
        2,
        1,
        2.0,
        8.0,
        2.0,
    )
    assert loss.loss_first == 2.5
    assert loss.loss_last is not None
    assert math.isnan(loss.loss_last)
    assert (other.backwards, other.scale_final, other.loss_last) == (1, None, 1.5)


def test_formats(record: Path) -> None:
    """Every format shows the same figures; JSON is strict."""
    table = _report(record, "table")
    assert "optimizer 0 (SGD)  3        1" in table
    assert "gan.py on engine compat 25.05, amp O2; it ended with exit code 3.\n" in table
    assert "| loss 0" in _report(record, "md")
    assert _report(record, "csv").splitlines()[1] == "optimizer 0 (SGD),3,1,,,,,,,0.375"
    document = json.loads(_report(record, "json"), parse_constant=pytest.fail)
    assert document["losses"][0]["loss_last"] == "nan"


def test_cut_off_record(record: Path) -> None:
    """A last line that was cut off is left out, and the missing end is told."""
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]) + '{"kind": "st')
    summary = read_exec_record(record)
    assert summary.optimizers[0].steps == 3
    assert "the record has no end" in _report(record, "table")


@pytest.mark.parametrize("line", ["{", "[]", '{"kind": "magic"}', '{"kind": "step"}', "7"])
def test_broken_line(line: str, record: Path) -> None:
    """A line in the middle that is no row is an error that names file and line."""
    lines = record.read_text().splitlines()
    record.write_text("\n".join([*lines[:3], line, *lines[3:]]))
    with pytest.raises(RecordError, match=r"steps\.jsonl, line 4, is not a row"):
        read_exec_record(record)


def test_later_schema(record: Path) -> None:
    """A record of a later version asks for an upgrade."""
    record.write_text(json.dumps({**HEADER, "schema": 2}) + "\n")
    with pytest.raises(RecordError, match="upgrade ampcompare"):
        read_exec_record(record)


def test_told_from_other_files(record: Path, tmp_path: Path) -> None:
    """Only a file that begins as such a record is taken for one."""
    assert is_exec_record(record)
    other = tmp_path / "record.json"
    for text in ("", "[1]", '{"schema": 1}', "\0\0"):
        other.write_text(text)
        assert not is_exec_record(other)
    assert not is_exec_record(tmp_path)
    assert not is_exec_record(tmp_path / "absent")


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2"])
def test_skipped_steps_of_a_fused_optimizer(behind: Any, arm: str) -> None:
    """The host skips them under arms of Apex, and the optimizer itself under `torch.amp`."""
    torch.manual_seed(0)
    recorder, events = Recorder(None, {}), Subscriptions(Layer.RECORD)
    recorded: list[dict[str, Any]] = []
    recorder.call_after_each_row(recorded.append)
    rows = RecordedSteps(recorder)
    behind(arm, rows)
    record_grad_scalers(rows, events)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    try:
        for factor in (1.0, float("inf"), 1.0):
            (model(torch.ones(2, 6)).float().square().mean() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        events.end()
    assert [row["applied"] for row in recorded if row["kind"] == "step"] == [True, False, True]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("arm", ["script", "fp32"])
def test_a_step_without_the_scaler_of_its_loss_is_a_step(behind: Any, arm: str) -> None:
    """The script scales the loss by its GradScaler and steps the optimizer by itself; one around another is one."""
    recorder, events = Recorder(None, {}), Subscriptions(Layer.RECORD)
    recorded: list[dict[str, Any]] = []
    recorder.call_after_each_row(recorded.append)
    rows = RecordedSteps(recorder)
    behind(arm, rows)
    record_grad_scalers(rows, events)
    model, scaler = torch.nn.Linear(6, 3), torch.amp.GradScaler("cpu", init_scale=4.0)

    class Around(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            inner.step()

    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = Around(model.parameters(), 0.1)
    try:
        for _ in range(3):
            scaler.scale(model(torch.ones(2, 6)).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        events.end()
    assert [row["applied"] for row in recorded if row["kind"] == "step"] == [True] * 3
    losses = [row for row in recorded if row["kind"] == "backward"]
    assert [row["overflow"] for row in losses] == [None if arm == "fp32" else False] * 3
