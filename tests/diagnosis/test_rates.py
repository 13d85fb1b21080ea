"""The learning rates still to come, against those that the schedulers give later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from ampcompare.diagnosis.rates import RateFollower, RateForecast

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")

END = 200


def optimizer_of_two_groups() -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.05)]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def train(
    optimizer: Optimizer, schedulers: Any, steps: int, *, at: int, paces: tuple[int, ...] = (1,), **known: Any
) -> tuple[list[list[float]], RateForecast, RateFollower]:
    """Make some steps, and return the rates from step `at` on, what is said of them there, and the history.

    Args:
        paces: steps between two moves, by scheduler.
        known: of `ahead`.
    """
    history = RateFollower(optimizer)
    rows = []
    for step in range(steps):
        rows.append([group["lr"] for group in optimizer.param_groups])
        history.note_rates_of_next_step()
        if step == at:
            ahead = history.forecast_rates(**known)
        optimizer.step()
        for scheduler, every in zip(schedulers, paces, strict=True):
            if (step + 1) % every == 0:
                scheduler.step()
    return rows[at:], ahead, history


def is_as(rates: RateForecast, rows: list[list[float]]) -> bool:
    return [list(row) for row in rates.rows] == [pytest.approx(row, rel=1e-12) for row in rows]


class Inverse(lr_scheduler.LRScheduler):
    """A scheduler of the user's own."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [base / (1 + self.last_epoch) for base in self.base_lrs]


# Whether a scheduler says itself when the training ends.
SCHEDULES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "CosineAnnealingLR": (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=END, eta_min=1e-4), True),
    "OneCycleLR": (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=END, three_phase=True), True),
    "LinearLR, down": (lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=END), True),
    "LinearLR, up": (lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, total_iters=60), False),
    "PolynomialLR": (lambda o: lr_scheduler.PolynomialLR(o, total_iters=END, power=2.0), True),
    "ConstantLR": (lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=100), False),
    "StepLR": (lambda o: lr_scheduler.StepLR(o, 30, 0.5), False),
    "MultiStepLR": (lambda o: lr_scheduler.MultiStepLR(o, [50, 150], 0.1), False),
    "ExponentialLR": (lambda o: lr_scheduler.ExponentialLR(o, 0.99), False),
    "LambdaLR": (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 if step < 100 else 0.1), False),
    "MultiplicativeLR": (lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.99), False),
    "CosineAnnealingWarmRestarts": (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 40, 2), False),
    "CyclicLR": (lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 25, mode="exp_range", gamma=0.99), False),
    "CyclicLR, own scale": (
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 25, scale_fn=lambda x: 1 / x),
        False,
    ),
    "SWALR": (lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=50), False),
    "SequentialLR": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 20), lr_scheduler.CosineAnnealingLR(o, END - 20)], [20]
        ),
        True,
    ),
    "ChainedScheduler": (
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(o, 0.1, 1.0, 20), lr_scheduler.ExponentialLR(o, 0.99)]
        ),
        False,
    ),
    "ChainedScheduler of a SequentialLR": (
        lambda o: lr_scheduler.ChainedScheduler(
            [
                lr_scheduler.SequentialLR(
                    o, [lr_scheduler.ConstantLR(o, 0.1, 10), lr_scheduler.ExponentialLR(o, 0.99)], [10]
                ),
                lr_scheduler.CosineAnnealingLR(o, END),
            ]
        ),
        True,
    ),
    "a scheduler of the user's own": (Inverse, False),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # of SequentialLR in torch 2.6
@pytest.mark.parametrize(("make", "says_end"), SCHEDULES.values(), ids=SCHEDULES)
def test_the_rates_of_each_scheduler(make: Callable[[Any], Any], says_end: bool) -> None:
    """A copy gives the rates that the scheduler itself gives later, and leaves it as it is; an end is not guessed."""
    optimizer = optimizer_of_two_groups()
    rows, ahead, history = train(optimizer, [make(optimizer)], END, at=30, total=None if says_end else END)
    if not says_end:
        untold = history.forecast_rates()
        assert (untold.known, untold.basis) == (
            False,
            "its scheduler does not say when it ends: give --steps",
        )
    assert (ahead.known, ahead.total, ahead.basis) == (True, END, f"its scheduler, to step {END}")
    assert is_as(ahead, rows)
    assert not history.departs_from_forecast(ahead)


@pytest.mark.parametrize(("total", "paces"), [(40, (1,)), (280, (7,)), (400, (10,)), (20, (1, 1))])
def test_a_scheduler_moves_at_its_own_pace(total: int, paces: tuple[int, ...]) -> None:
    """Once in some steps, as at the end of each epoch, or several times a step, so it does ahead, and ends there."""
    optimizer = optimizer_of_two_groups()
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    rows, ahead, _ = train(optimizer, [scheduler for _ in paces], total, at=min(24, total // 2), paces=paces)
    assert ahead.total == total
    assert is_as(ahead, rows)


def test_the_loops_of_the_script_say_when_an_epoch_ends() -> None:
    """Where a prefix lies in the first epoch, its scheduler is taken to move once in each of the inner loop."""
    optimizer = optimizer_of_two_groups()
    schedulers = [lr_scheduler.StepLR(optimizer, 1, 0.5)]
    rows, ahead, _ = train(optimizer, schedulers, 200, at=20, paces=(50,), loops=[50, 4])
    assert (ahead.basis, ahead.total) == ("its scheduler, to step 200, if it moves every 50 steps", 200)
    assert is_as(ahead, rows)
    _, ahead, _ = train(optimizer, schedulers, 21, at=20, paces=(50,), total=200)
    assert ahead.basis == "its scheduler made no step so far"


def test_rates_that_stay_or_that_the_script_sets() -> None:
    optimizer = optimizer_of_two_groups()
    _, ahead, history = train(optimizer, [], 6, at=5, paces=())
    assert (ahead.known, ahead.basis) == (True, "")
    optimizer.param_groups[0]["lr"] = 0.01
    history.note_rates_of_next_step()
    assert (history.forecast_rates().known, history.forecast_rates().basis) == (
        False,
        "the script sets them itself",
    )


def test_a_plateau_cannot_be_known() -> None:
    optimizer = optimizer_of_two_groups()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
    history = RateFollower(optimizer)
    for _ in range(5):
        history.note_rates_of_next_step()
        scheduler.step(1.0)
    assert (history.forecast_rates(END).known, history.forecast_rates(END).basis) == (
        False,
        "a plateau of a metric decides them",
    )


def test_a_script_that_also_sets_the_rate_leaves_the_forecast() -> None:
    """What follows in the first steps is compared with what was said of it."""
    optimizer = optimizer_of_two_groups()
    _, ahead, history = train(optimizer, [lr_scheduler.CosineAnnealingLR(optimizer, END)], 12, at=9)
    assert not history.departs_from_forecast(ahead)
    optimizer.param_groups[1]["lr"] = 1e-5
    history.note_rates_of_next_step()
    assert history.departs_from_forecast(ahead)
