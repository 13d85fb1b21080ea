"""Limits and ends that a user sets."""

from __future__ import annotations

import pytest

from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.metric import TOP1, Metric
from ampcompare.results.records.run import StepRecord
from ampcompare.training.policies import DivergenceDetector, EarlyStop, ScaleLimits


def steps(scales: list[float], applied: list[bool]) -> list[StepRecord]:
    pairs = enumerate(zip(scales, applied, strict=True))
    return [StepRecord(at, 0, 1.0, (scale,), (scale,), (done,), None, 0.1, 0.0) for at, (scale, done) in pairs]


def epoch(number: int, correct: int) -> EpochResult:
    """A result out of a hundred samples."""
    return EpochResult(
        epoch=number, samples=100, values={"top-1": correct / 100}, loss=1.0, train_seconds=1, eval_seconds=1
    )


def limits(
    stop_loss_scale: float | None = None, max_skipped: int | None = None
) -> tuple[ScaleLimits, DivergenceDetector]:
    """Limits, and the divergence that they report to; it ignores divergence of any other kind."""
    divergence = DivergenceDetector(99, [], stops=False)
    return ScaleLimits(divergence, stop_loss_scale, max_skipped), divergence


def test_a_scale_below_its_floor_ends_the_run() -> None:
    policy, divergence = limits(1.0)
    policy.after_steps(3, steps([4, 2, 1], [True, False, False]))
    assert not divergence.ends_run
    policy.after_steps(6, steps([1, 0.5, 0.25], [True, False, False]))
    assert divergence.ends_run
    assert divergence.diverged_step == 1
    assert divergence.reason == "loss scale 0.5 is below --fail-below-loss-scale 1"


def test_consecutive_skipped_steps_end_the_run() -> None:
    """The count crosses blocks, and an applied step resets it."""
    policy, divergence = limits(max_skipped=2)
    policy.after_steps(4, steps([1] * 4, [False, False, True, False]))
    assert not divergence.ends_run
    policy.after_steps(6, steps([1] * 2, [False, False]))
    assert divergence.ends_run
    assert divergence.reason == "3 skipped steps in a row, more than --max-consecutive-skips 2"


def test_patience_counts_epochs_without_a_better_metric() -> None:
    stop = EarlyStop(2, None, TOP1)
    ends = []
    for number, correct in enumerate([50, 50, 60, 60, 59]):
        stop.after_epoch(epoch(number, correct))
        ends.append(stop.end_reason is not None)
    assert ends == [False] * 4 + [True]
    assert stop.end_reason == "no better top-1 for 2 epochs, after epoch 4"


def test_lower_may_be_better() -> None:
    bits = Metric(name="bits", better="lower")
    patient, aimed = EarlyStop(1, None, bits), EarlyStop(None, 0.5, bits)
    for number, value in enumerate([90, 70, 50, 60]):
        assert patient.end_reason is None
        assert aimed.end_reason is None or number > 2
        patient.after_epoch(epoch(number, value))
        aimed.after_epoch(epoch(number, value))
    assert patient.end_reason == "no better bits for 1 epochs, after epoch 3"
    assert aimed.end_reason is not None
    assert aimed.end_reason.startswith("bits of 0.50 reached 0.5")


@pytest.mark.parametrize(("correct", "ends"), [(89, False), (90, True), (91, True)])
def test_a_target_is_enough_when_it_is_reached(correct: int, ends: bool) -> None:
    stop = EarlyStop(None, 90.0, TOP1)
    stop.after_epoch(epoch(0, correct))
    assert (stop.end_reason is not None) == ends
