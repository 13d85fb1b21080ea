"""The points of a run that stay in its record."""

import json
import math

import pytest

from ampcompare.results.records.run import RunRecord, StepRecord, Trace, dump_json
from ampcompare.training.run_summary import MAX_LENGTH, Tracer


def record(step: int, loss: float = 1.0, scales: tuple[float, ...] = (8.0,)) -> StepRecord:
    return StepRecord(step, 0, loss, scales, scales, (True,), None, 0.1, 0.0)


def traced(count: int, scales: tuple[float, ...] = (8.0,)) -> Trace:
    """The trace of so many steps, every third of which was skipped."""
    tracer = Tracer()
    for step in range(count):
        tracer.add(record(step, 1 / (step + 1), scales), step // 3)
        assert len(tracer.points) <= MAX_LENGTH
    trace = tracer.trace([0.1 * (step + 1) for step in range(count)])
    assert trace is not None
    return trace


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 1000, 12345])
def test_points_are_few_even_and_reach_the_end(count: int) -> None:
    """Whatever the length, the points begin at the first step, are evenly apart, and end at the last step."""
    trace = traced(count)
    assert trace.steps[0] == 0
    assert trace.steps[-1] == count - 1
    assert min(count, MAX_LENGTH // 2) <= len(trace.steps) <= MAX_LENGTH + 1
    apart = {b - a for a, b in zip(trace.steps[:-2], trace.steps[1:-1], strict=True)}
    assert len(apart) <= 1
    assert trace.skipped == [step // 3 for step in trace.steps]
    assert trace.losses == pytest.approx([1 / (step + 1) for step in trace.steps], rel=1e-5)


def test_quantiles_go_from_fastest_to_slowest() -> None:
    """21 quantiles of the step times, from the minimum over the median to the maximum."""
    quantiles = traced(101).step_seconds
    assert len(quantiles) == 21
    assert quantiles == sorted(quantiles)
    assert (quantiles[0], quantiles[10], quantiles[20]) == pytest.approx((0.1, 5.1, 10.1))
    assert traced(1).step_seconds == []


def test_without_steps_or_scales_there_is_nothing_to_trace() -> None:
    assert Tracer().trace([]) is None
    assert traced(5, scales=()).loss_scales == []


def test_a_trace_survives_json_and_old_records_have_none() -> None:
    """Losses that are not finite read back as they were; a record from before there were traces is still read."""
    trace = Trace(steps=[0, 1, 2], losses=[1.0, math.nan, math.inf], loss_scales=[math.inf] * 3, skipped=[0, 1, 2])
    base = {"cell": "0", "arm": "fp32", "status": "completed", "config": {}}
    text = dump_json(RunRecord.model_validate({**base, "trace": trace}))
    again = RunRecord.model_validate(json.loads(text)).trace
    assert again is not None
    assert math.isnan(again.losses[1])
    assert again.losses[2] == again.loss_scales[0] == math.inf
    assert RunRecord.model_validate({**base, "schema": 1}).trace is None
