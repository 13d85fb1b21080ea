"""When a run counts as diverged."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ampcompare.record import StepRecord
from ampcompare.training.divergence import DivergenceWatch, weights_finite

NAN, INF = math.nan, math.inf


def steps(losses: list[float], applied: list[bool] | None = None, start: int = 0) -> list[StepRecord]:
    """Records of consecutive steps."""
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


def test_a_skipped_step_with_a_bad_loss_is_no_divergence() -> None:
    """Under dynamic scaling such a step left the weights alone; only its first occurrence is noted."""
    watch = DivergenceWatch(patience=3)
    assert not watch.look(steps([1.0, INF, 0.9, NAN, NAN], [True, False, True, False, False]), [model()])
    assert watch.first_nonfinite_loss_step == 1
    assert watch.diverged_step is None


def test_bad_losses_in_a_row_diverge_at_the_first_of_them() -> None:
    """The row may cross a drain, and the recorded step is its first."""
    watch = DivergenceWatch(patience=4)
    assert not watch.look(steps([1.0, NAN, NAN]), [model()])
    assert watch.look(steps([NAN, NAN, NAN], start=3), [model()])
    assert (watch.diverged_step, watch.reason) == (1, "4 non-finite losses in a row")


def test_a_row_that_ends_inside_a_block_still_counts() -> None:
    """A finite loss after the row does not undo it."""
    watch = DivergenceWatch(patience=3)
    assert watch.look(steps([1.0, NAN, NAN, NAN, 1.0]), [model()])
    assert watch.diverged_step == 1


def test_bad_weights_diverge_at_the_first_applied_bad_loss() -> None:
    """Where a loss went bad in the block, that step is recorded rather than the end of the block."""
    watch = DivergenceWatch(patience=10)
    assert watch.look(steps([1.0, 0.9, NAN, NAN]), [model(NAN)])
    assert (watch.diverged_step, watch.reason) == (2, "non-finite weights")


def test_bad_weights_without_a_bad_loss_are_dated_to_the_last_step() -> None:
    """The update of the last step made them bad before any loss could show it."""
    watch = DivergenceWatch(patience=10)
    assert watch.look(steps([1.0, 0.9, 0.8]), [model(INF)])
    assert watch.diverged_step == 2


def test_divergence_is_final() -> None:
    """Later blocks change neither step nor reason."""
    watch = DivergenceWatch(patience=1)
    watch.look(steps([NAN]), [model()])
    assert watch.look(steps([1.0], start=1), [model()])
    assert watch.diverged_step == 0
