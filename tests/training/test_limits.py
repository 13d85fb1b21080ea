"""Limits and ends that a user sets."""

import pytest

from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.metric import TOP1, Metric
from ampcompare.training.policies import EarlyStop


def epoch(number: int, correct: int) -> EpochResult:
    """A result out of a hundred samples."""
    return EpochResult(
        epoch=number, samples=100, values={"top-1": correct / 100}, loss=1.0, train_seconds=1, eval_seconds=1
    )


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
