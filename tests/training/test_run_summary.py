"""From steps and evaluations to the numbers of a run."""

import math
from typing import Any

import numpy as np
import pytest

from ampcompare.results.records.evaluation import EpochResult, pack_right_samples
from ampcompare.results.records.run import RunTrace
from ampcompare.results.records.step import StepRecord
from ampcompare.training.meters import PeakMemory
from ampcompare.training.policies import DivergenceDetector
from ampcompare.training.run_summary import (
    MAX_LENGTH,
    RunMetrics,
    StepSampler,
    find_medians_of_halves,
    outlier_share_of_times,
)


def record(step: int, seconds: float, applied: bool = True, scale: float = 8.0) -> StepRecord:
    return StepRecord(step, 0, 1.0, (scale,), (scale,), (applied,), None, seconds, 0.001)


def evaluation(epoch: int, correct: int, **further: Any) -> EpochResult:
    """An evaluation of ten samples, of which nine have the class among the best five guesses."""
    counts = {"top-1": correct, "top-5": 9}
    values = {name: count / 10 for name, count in counts.items()}
    times = {"train_seconds": 3.0, "eval_seconds": 1.0}
    return EpochResult(epoch=epoch, samples=10, counts=counts, values=values, loss=0.5, **times, **further)


def test_tally_leaves_warm_up_out_of_times_but_counts_its_skips() -> None:
    tally = RunMetrics(warmup_steps=2, batch_size=32)
    tally.add_steps([record(0, 9.0, applied=False), record(1, 9.0)])
    tally.add_steps([record(step, 0.1 * step, scale=4.0) for step in range(2, 7)])
    tally.add_epoch(evaluation(0, 7))
    summary = tally.summary_of_run(DivergenceDetector(3, []), PeakMemory(100, None), 12.0)
    assert (summary.num_steps, summary.skipped_steps, summary.final_loss_scale) == (7, 1, 4.0)
    assert summary.step_seconds_median == pytest.approx(0.4)
    assert summary.samples_per_second == pytest.approx(80)
    assert (summary.metric_final, summary.others_final, summary.epoch_seconds) == (0.7, {"top-5": 0.9}, 3.0)


def test_tally_of_a_diverged_run_claims_no_final_accuracy() -> None:
    """Accuracy of weights that are NaN is not a result; the best epoch before stays."""
    tally = RunMetrics(warmup_steps=0, batch_size=1)
    tally.add_epoch(evaluation(0, 7))
    watch = DivergenceDetector(3, [])
    watch.diverged_step, watch.reason = 4, "non-finite weights"
    summary = tally.summary_of_run(watch, PeakMemory(1, 2), 1.0)
    assert (summary.metric_final, summary.metric_best, summary.diverged_step) == (None, 0.7, 4)


def test_only_the_last_evaluation_keeps_its_images() -> None:
    """Per-image results of earlier epochs are dropped, and those of the last survive a checkpoint."""
    tally = RunMetrics(warmup_steps=0, batch_size=1)
    kept = [pack_right_samples(np.arange(10) < count, np.arange(10)) for count in (5, 7)]
    for epoch, images in enumerate(kept):
        tally.add_epoch(evaluation(epoch, 5 + 2 * epoch, per_sample=images))
    restored = RunMetrics(warmup_steps=0, batch_size=1)
    restored.load_state_dict(tally.state_dict())
    for each in (tally, restored):
        assert [epoch.per_sample for epoch in each.epochs] == [None, kept[1]]


def test_equal_losses_have_equal_digests() -> None:
    """The digest changes with the last bit of one loss."""
    a, b, c = (RunMetrics(0, 1) for _ in range(3))
    a.add_steps([record(0, 1.0)])
    b.add_steps([record(0, 2.0)])
    c.add_steps([record(0, 1.0)._replace(loss=1.0 + 2**-52)])
    digests = [
        t.summary_of_run(DivergenceDetector(1, []), PeakMemory(0, None), 1.0).losses_sha256 for t in (a, b, c)
    ]
    assert digests[0] == digests[1] != digests[2]


def traced(count: int, scales: tuple[float, ...] = (8.0,)) -> RunTrace:
    """The trace of so many steps, every third of which was skipped."""
    tracer = StepSampler()
    for step in range(count):
        tracer.add_step(record(step, 0.1)._replace(loss=1 / (step + 1), loss_scales=scales), step // 3)
        assert len(tracer.points) <= MAX_LENGTH
    trace = tracer.find_trace_of_run([0.1 * (step + 1) for step in range(count)])
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
    assert StepSampler().find_trace_of_run([]) is None
    assert traced(5, scales=()).loss_scales == []


def test_outliers_by_hand() -> None:
    """Of eleven times one lies beyond three scaled deviations of the median."""
    assert outlier_share_of_times([10, 11, 9, 10, 12, 8, 10, 11, 9, 10, 50]) == pytest.approx(1 / 11)


def test_what_is_near_the_median_is_no_outlier() -> None:
    """However steady the other steps are, one within a hundredth of the median is none, and one beyond it is."""
    assert outlier_share_of_times([1.0] * 9 + [1.009]) == 0
    assert outlier_share_of_times([1.0] * 9 + [1.011]) == pytest.approx(0.1)
    assert outlier_share_of_times([]) is None


def test_halves_by_hand() -> None:
    """Each half has its median, and the error is that of two medians by the deviations in each half."""
    two = find_medians_of_halves([1.0, 1.1, 0.9, 2.0, 2.2, 1.8])
    assert two is not None
    assert (two.first, two.second) == (1.0, 2.0)
    one = math.sqrt(math.pi / 2) * 1.4826 * 0.1 / math.sqrt(3)
    assert two.error == pytest.approx(math.hypot(one, one))


@pytest.mark.parametrize("seconds", [[], [1.0], [0.0, 0.0, 1.0, 1.0]])
def test_no_halves(seconds: list[float]) -> None:
    """Fewer than two steps, or a median of zero, have no halves to compare."""
    assert find_medians_of_halves(seconds) is None
