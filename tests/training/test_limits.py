"""Ends that a user sets."""

from __future__ import annotations

import pytest

from ampcompare.record import EpochResult, StepRecord
from ampcompare.training.limits import EarlyStop, ScaleLimits


def steps(scales: list[float], applied: list[bool]) -> list[StepRecord]:
    """Steps with these scales after them."""
    pairs = enumerate(zip(scales, applied, strict=True))
    return [StepRecord(at, 0, 1.0, (scale,), (scale,), (done,), None, 0.1, 0.0) for at, (scale, done) in pairs]


def epoch(number: int, correct: int) -> EpochResult:
    """A result out of a hundred samples."""
    return EpochResult(
        epoch=number, samples=100, top1_correct=correct, top5_correct=100, loss=1.0, train_seconds=1, eval_seconds=1
    )


def test_a_scale_below_its_floor_ends_the_run() -> None:
    """The floor itself is still good; the first scale below it is told of with its step."""
    limits = ScaleLimits(1.0, None)
    assert limits.look(steps([4, 2, 1], [True, False, False])) is None
    assert limits.look(steps([1, 0.5, 0.25], [True, False, False])) == (
        1,
        "loss scale 0.5 is below --stop-loss-scale 1",
    )


def test_skipped_steps_in_a_row_end_the_run() -> None:
    """The row may cross a block; an applied step ends it; steps without a scale count too."""
    limits = ScaleLimits(None, 2)
    assert limits.look(steps([1] * 4, [False, False, True, False])) is None
    assert limits.look(steps([1] * 2, [False, False])) == (1, "3 skipped steps in a row, and --max-skipped is 2")


def test_the_row_goes_on_after_a_checkpoint() -> None:
    """A run that goes on from a saved state counts what was skipped before it."""
    limits, again = ScaleLimits(None, 2), ScaleLimits(None, 2)
    limits.look(steps([1] * 2, [False, False]))
    again.load_state_dict(limits.state_dict())
    assert again.look(steps([1], [False])) is not None


def test_patience_counts_epochs_without_a_better_top1() -> None:
    """An equal result is not a better one, and a better one begins the count anew."""
    stop = EarlyStop(2, None)
    assert [stop.look(epoch(at, correct)) for at, correct in enumerate([50, 50, 60, 60, 59])] == [False] * 4 + [True]
    assert stop.reason == "no better top-1 for 2 epochs, after epoch 4"


@pytest.mark.parametrize(("correct", "ends"), [(89, False), (90, True), (91, True)])
def test_a_target_is_enough_when_it_is_reached(correct: int, ends: bool) -> None:
    """The target is in percent, and reaching it exactly is enough."""
    stop = EarlyStop(None, 90.0)
    assert stop.look(epoch(0, correct)) == ends
    assert (stop.reason is not None) == ends


def test_patience_survives_a_checkpoint() -> None:
    """What was waited before saving counts after it."""
    stop, again = EarlyStop(2, None), EarlyStop(2, None)
    stop.look(epoch(0, 50))
    stop.look(epoch(1, 50))
    again.load_state_dict(stop.state_dict())
    assert again.look(epoch(2, 50))
