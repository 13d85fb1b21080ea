"""Which layers have lost their running statistics to an overflow."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.experiment.launch.script.rows import read_script_rows
from ampcompare.script.arm_process import _record_lost_statistics
from ampcompare.script.recording.recorder import RecordedSteps, Recorder
from ampcompare.script.recording.summary import FORMAT, SCHEMA, read_exec_record
from ampcompare.script.remarks.lost_statistics import LostStatisticsWatch


def test_layers_with_finite_weights_and_other_statistics_are_named() -> None:
    lost, diverged = (
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ModuleDict({"norm": nn.BatchNorm1d(2)}))
        for _ in range(2)
    )
    with torch.no_grad():
        lost[2]["norm"](torch.full((4, 2), torch.inf))
        diverged[1](torch.full((4, 2), torch.inf))
        diverged[1].weight.fill_(torch.nan)
    assert LostStatisticsWatch().find_layers_with_lost_statistics() == ["2.norm (BatchNorm1d)"]
    lost[2]["norm"].reset_running_stats()
    assert LostStatisticsWatch().find_layers_with_lost_statistics() == []


def test_they_are_a_row_of_the_record(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    lost = nn.BatchNorm1d(2)
    assert lost.running_var is not None
    lost.running_var.fill_(torch.inf)
    recorder = Recorder(str(path), {"format": FORMAT, "schema": SCHEMA})
    recorder.add_row({"kind": "step", "optimizer": 0, "step": 0, "applied": False, "seconds": None})
    _record_lost_statistics(RecordedSteps(recorder), LostStatisticsWatch())
    recorder.close(0, None)
    assert read_script_rows(path).script_facts().lost_statistics == ["BatchNorm1d"]
    assert read_exec_record(path).ended is not None


def test_a_model_that_its_function_has_left_is_known() -> None:
    """As of a script whose training is in `main()`, which is over when it is looked for."""
    events = Subscriptions(Layer.RECORD)
    watch = LostStatisticsWatch()
    watch.follow(events)

    def main() -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        torch.optim.SGD(model.parameters(), 0.1)
        model[1](torch.full((4, 2), torch.inf))

    main()
    events.end()
    assert watch.find_layers_with_lost_statistics() == ["1 (BatchNorm1d)"]


def test_layers_without_statistics_are_none() -> None:
    kept = nn.BatchNorm1d(2, track_running_stats=False)
    masked = nn.Linear(2, 2)
    masked.register_buffer("mask", torch.full((2, 2), -torch.inf))
    assert LostStatisticsWatch().find_layers_with_lost_statistics() == []
    assert kept is not masked


@pytest.mark.parametrize(
    ("dtype", "size", "is_beyond"),
    [(torch.float16, 1000.0, True), (torch.float16, 10.0, False), (torch.float32, 1000.0, False)],
)
def test_a_variance_that_fp16_cannot_hold_is_a_remark(
    tmp_path: Path, dtype: torch.dtype, size: float, is_beyond: bool
) -> None:
    """Nothing has overflowed: the layer trains, and only its evaluation is wrong."""
    path = tmp_path / "script.jsonl"
    layer = nn.BatchNorm1d(2).to(dtype)
    out = layer(size * torch.tensor([[-1.0, 2.0], [1.0, -2.0]], dtype=dtype))
    assert torch.isfinite(out).all()
    watch = LostStatisticsWatch()
    assert watch.find_layers_beyond_fp16() == ["BatchNorm1d"] * is_beyond
    assert watch.find_layers_with_lost_statistics() == []
    recorder = Recorder(str(path), {"format": FORMAT, "schema": SCHEMA})
    _record_lost_statistics(RecordedSteps(recorder), watch)
    recorder.close(0, None)
    facts = read_script_rows(path).script_facts()
    assert facts.lost_statistics == []
    assert ["the running variance of BatchNorm1d is inf" in text for text in facts.remarks] == [
        True
    ] * is_beyond


def test_an_input_that_has_overflowed_is_no_variance_beyond_fp16() -> None:
    layer = nn.BatchNorm1d(2).half()
    layer(torch.full((4, 2), torch.inf, dtype=torch.float16))
    watch = LostStatisticsWatch()
    assert watch.find_layers_beyond_fp16() == []
    assert watch.find_layers_with_lost_statistics() == ["BatchNorm1d"]
