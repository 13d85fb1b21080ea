"""When a run counts as diverged, and when it is good enough."""

import math

import pytest
import torch
from torch import nn

from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.metric import TOP1, Metric
from ampcompare.results.records.run import StepRecord
from ampcompare.training.policies import DivergenceDetector, EarlyStop, weights_finite

NAN, INF = math.nan, math.inf


def steps(losses: list[float], applied: list[bool] | None = None, start: int = 0) -> list[StepRecord]:
    applied = applied or [True] * len(losses)
    return [
        StepRecord(start + place, 0, loss, (1.0,), (1.0,), (flag,), None, 0.1, 0.0)
        for place, (loss, flag) in enumerate(zip(losses, applied, strict=True))
    ]


def model(value: float = 1.0) -> nn.Module:
    """A layer whose first weight is `value`."""
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight[0, 0] = value
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_finite_weights_are_finite(dtype: torch.dtype) -> None:
    """A norm that would overflow in fp16 is not taken for an infinity, and real ones are found."""
    layer = nn.Linear(64, 64).to(dtype)
    nn.init.constant_(layer.weight, 60000.0)
    assert weights_finite([layer])
    for bad in (INF, -INF, NAN):
        with torch.no_grad():
            layer.weight[3, 5] = bad
        assert not weights_finite([layer])


def detect(patience: int, *blocks: list[StepRecord], weight: float = 1.0, stops: bool = True) -> DivergenceDetector:
    """A detector that has seen some blocks, with a model of this weight."""
    divergence = DivergenceDetector(patience, [model(weight)], stops=stops)
    for block in blocks:
        assert not divergence.after_steps(block[-1].step + 1, block)
    return divergence


def test_a_skipped_step_with_a_bad_loss_is_not_divergence() -> None:
    """Under dynamic scaling such a step left the weights alone; only its first occurrence is recorded."""
    divergence = detect(3, steps([1.0, INF, 0.9, NAN, NAN], [True, False, True, False, False]))
    assert not divergence.ends_run
    assert divergence.first_nonfinite_loss_step == 1
    assert divergence.diverged_step is None


def test_consecutive_bad_losses_diverge_at_the_first_of_them() -> None:
    """They may cross a drain, and the recorded step is their first."""
    blocks = steps([1.0, NAN, NAN]), steps([NAN, NAN, NAN], start=3)
    assert not detect(4, blocks[0]).ends_run
    divergence = detect(4, *blocks)
    assert divergence.ends_run
    assert (divergence.diverged_step, divergence.reason) == (1, "4 non-finite losses in a row")


def test_bad_weights_diverge_at_the_first_applied_bad_loss() -> None:
    """If a loss went bad in the block, that step is recorded rather than the end of the block."""
    divergence = detect(10, steps([1.0, 0.9, NAN, NAN]), weight=NAN)
    assert (divergence.diverged_step, divergence.reason) == (2, "non-finite weights")


def test_bad_weights_without_a_bad_loss_are_dated_to_the_last_step() -> None:
    assert detect(10, steps([1.0, 0.9, 0.8]), weight=INF).diverged_step == 2


def test_later_blocks_do_not_move_divergence() -> None:
    divergence = detect(1, steps([NAN]), steps([1.0], start=1))
    assert divergence.ends_run
    assert divergence.diverged_step == 0


def test_divergence_is_recorded_without_ending_the_run_if_it_continues() -> None:
    divergence = detect(1, steps([NAN]), stops=False)
    assert divergence.diverged_step == 0
    assert not divergence.ends_run
    divergence.end(3, "a limit")
    assert divergence.ends_run


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
