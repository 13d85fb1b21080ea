"""From steps and evaluations to the numbers of a run."""

from typing import Any

import numpy as np
import pytest

from ampcompare.results.records.evaluation import EpochResult, pack_right
from ampcompare.results.records.run import StepRecord
from ampcompare.training.meters import PeakMemory
from ampcompare.training.policies import DivergenceDetector
from ampcompare.training.run_summary import RunMetrics


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
    summary = tally.summary(DivergenceDetector(3, []), PeakMemory(100, None), 12.0)
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
    summary = tally.summary(watch, PeakMemory(1, 2), 1.0)
    assert (summary.metric_final, summary.metric_best, summary.diverged_step) == (None, 0.7, 4)


def test_only_the_last_evaluation_keeps_its_images() -> None:
    """Per-image results of earlier epochs are dropped, and those of the last survive a checkpoint."""
    tally = RunMetrics(warmup_steps=0, batch_size=1)
    kept = [pack_right(np.arange(10) < count, np.arange(10)) for count in (5, 7)]
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
    digests = [t.summary(DivergenceDetector(1, []), PeakMemory(0, None), 1.0).losses_sha256 for t in (a, b, c)]
    assert digests[0] == digests[1] != digests[2]
