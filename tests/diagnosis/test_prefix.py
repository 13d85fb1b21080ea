"""What 16-bit weights lose of an update, now and at the learning rates ahead, in exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ampcompare.diagnosis.prefix import PrefixWatch, rates_ahead, share_lost, zero_denominators

ULP = 2.0**-7  # of bf16 in [1, 2)


def test_half_an_ulp_is_the_border() -> None:
    """An update of half an ulp or less leaves a bf16 weight of 1 as it is (a tie goes to even), more moves it."""
    weight = torch.ones(3)
    update = torch.tensor([ULP / 2, ULP / 2 + 2.0**-20, -ULP / 2])
    ((mass, lost),) = share_lost(weight, update, torch.bfloat16, [1.0]).tolist()
    assert mass == float(update.abs().double().sum())
    assert lost == ULP / 2  # downwards from 1 the numbers lie twice as close


def test_a_factor_scales_the_update() -> None:
    """What a lower learning rate loses: at a tenth of it, an update that moved the weight does not."""
    rows = share_lost(torch.ones(1), torch.tensor([0.02]), torch.bfloat16, [1.0, 0.1]).tolist()
    assert rows[0][1] == 0
    assert rows[1][0] == rows[1][1] == pytest.approx(0.002)


def test_a_weight_of_fp16_has_finer_steps() -> None:
    rows = {
        dtype: share_lost(torch.ones(1), torch.tensor([0.001]), dtype, [1.0])[0, 1]
        for dtype in (torch.float16, torch.bfloat16)
    }
    assert float(rows[torch.float16]) == 0
    assert float(rows[torch.bfloat16]) == pytest.approx(0.001)


def _train(watch: PrefixWatch, optimizer: torch.optim.Optimizer, scheduler: Any = None, steps: int = 20) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    for _ in range(steps):
        param.grad = torch.full_like(param, 0.5)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    watch.close()


def test_sgd_at_a_known_rate() -> None:
    """Half of the weights are 1 and half 2**-10: an update of 2**-18 is lost by the first and moves the others."""
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0**-10] * 8))
    watch = PrefixWatch(20)
    _train(watch, torch.optim.SGD([param], lr=2.0**-17))
    found = watch.result()
    assert found.steps == 20
    assert found.rates_known
    assert found.shares["bf16"].now == found.shares["bf16"].rest == pytest.approx(0.5)
    assert found.shares["fp16"].now == pytest.approx(0.5)
    assert found.largest_gradient == 0.5


SCHEDULES: list[tuple[str, Callable[[Any], Any], int | None]] = [
    ("cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=200), None),
    ("one cycle", lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=200), None),
    ("linear", lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=200), None),
    ("polynomial", lambda o: lr_scheduler.PolynomialLR(o, total_iters=200, power=2.0), None),
    ("constant, then full", lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=200), None),
    ("step", lambda o: lr_scheduler.StepLR(o, 30, 0.5), 200),
    ("steps", lambda o: lr_scheduler.MultiStepLR(o, [50, 150], 0.1), 200),
    ("exponential", lambda o: lr_scheduler.ExponentialLR(o, 0.99), 200),
    ("lambda", lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)), 200),
    ("multiplicative", lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.99), 200),
    ("warm restarts", lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 40), 200),
    ("cyclic", lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=25), 200),
    (
        "one after the other",
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 20), lr_scheduler.CosineAnnealingLR(o, 180)], [20]
        ),
        None,
    ),
    (
        "together",
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(o, 0.1, 1.0, 20), lr_scheduler.ExponentialLR(o, 0.99)]
        ),
        200,
    ),
]


@pytest.mark.filterwarnings("ignore:.*scheduler.step")
@pytest.mark.parametrize(("make", "total"), [case[1:] for case in SCHEDULES], ids=[case[0] for case in SCHEDULES])
def test_the_rates_of_each_schedule(make: Callable[[Any], Any], total: int | None) -> None:
    """A copy gives the rates that the scheduler itself gives later, and leaves it as it is."""
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    for _ in range(30):
        optimizer.step()
        scheduler.step()
    ahead = rates_ahead(optimizer, 30, total, varies=True)
    assert ahead.known
    assert ahead.total == 200
    later = []
    for _ in range(170):
        later.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [row[0] for row in ahead.rows] == pytest.approx(later, rel=1e-12)


def test_rates_that_cannot_be_known() -> None:
    """A plateau, an unknown end, and rates that the script sets itself are not guessed."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert not rates_ahead(optimizer, 30, None, varies=True).known
    assert rates_ahead(optimizer, 30, None, varies=False).known
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    assert "plateau" in rates_ahead(optimizer, 30, 200, varies=False).basis
    del plateau
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = lr_scheduler.StepLR(other, 30)
    assert rates_ahead(other, 30, 200, varies=False).basis == "its scheduler made no step so far"
    for _ in range(10):
        other.step()
        scheduler.step()
    assert "give --steps" in rates_ahead(other, 10, None, varies=False).basis


def test_an_epochs_scheduler_moves_once_an_epoch() -> None:
    """One move in ten steps is one in ten steps ahead, too."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for step in range(30):
        optimizer.step()
        if (step + 1) % 10 == 0:
            scheduler.step()
    ahead = rates_ahead(optimizer, 30, None, varies=True)
    assert ahead.total == 100
    assert len({row[0] for row in ahead.rows}) == 7


def test_the_rest_of_the_schedule_is_counted() -> None:
    """A prefix and its schedule give the share that the whole training counts itself."""

    def train(steps: int) -> PrefixWatch:
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
        watch = PrefixWatch(steps)
        if steps == 400:
            watch._probes = set(range(20, 400, 20))
        for _ in range(steps):
            optimizer.zero_grad()
            batch = torch.randn(16, 8)
            torch.nn.functional.cross_entropy(layer(batch), batch[:, :4].argmax(1)).backward()
            optimizer.step()
            scheduler.step()
        watch.close()
        return watch

    predicted = train(40).result().shares["bf16"].rest
    counted = train(400).result().shares["bf16"].now
    assert predicted == pytest.approx(counted, rel=0.1)


def test_adam_divides_by_zero_in_fp16() -> None:
    """Where eps and the second moment are zero in the type, though the gradient is not."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([param], lr=0.1)
    param.grad = torch.tensor([1e-6, 1e-6, 1.0, 0.0])
    optimizer.step()
    assert float(zero_denominators(optimizer, torch.float16)) == 0.5
    assert float(zero_denominators(optimizer, torch.bfloat16)) == 0.0
    optimizer.param_groups[0]["eps"] = 1e-4
    assert float(zero_denominators(optimizer, torch.float16)) == 0.0
