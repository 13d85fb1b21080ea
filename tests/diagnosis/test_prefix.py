"""What 16-bit weights lose of an update, now and at the learning rates ahead, in exact arithmetic."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RAdam, RMSprop, lr_scheduler

from ampcompare.diagnosis.prefix import PrefixWatch, lost_update_masses, share_of_steps_divided_by_zero
from ampcompare.results.records.outlook import WatchedFirstSteps

ULP = 2.0**-7  # of bf16 in [1, 2)


@pytest.mark.parametrize(
    ("dtype", "update", "lost"),
    [
        (torch.bfloat16, ULP / 2, 1),  # a tie goes to even
        (torch.bfloat16, ULP / 2 + 2.0**-20, 0),
        (torch.bfloat16, -ULP / 2, 0),  # downwards from 1 the numbers lie twice as close
        (torch.bfloat16, 0.001, 1),
        (torch.float16, 0.001, 0),
    ],
)
def test_half_an_ulp_is_the_border(dtype: torch.dtype, update: float, lost: int) -> None:
    """An update of half an ulp or less leaves a weight of 1 as it is, more moves it."""
    ((mass, gone),) = lost_update_masses(torch.ones(1), torch.tensor([update]), dtype, [1.0]).tolist()
    assert (mass, gone) == (pytest.approx(abs(update)), pytest.approx(lost * abs(update)))


def _train(
    watch: PrefixWatch, optimizer: torch.optim.Optimizer, scheduler: Any = None, steps: int = 20
) -> None:
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
    found = watch.read_prefix()
    assert found.steps == 20
    assert found.rates_known
    assert found.shares["bf16"].now == found.shares["bf16"].rest == pytest.approx(0.5)
    assert found.shares["fp16"].now == pytest.approx(0.5)
    assert found.largest_gradient == 0.5


class WithoutRate(torch.optim.Optimizer):
    """Finds the length of its steps itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param -= 2.0**-18


def test_an_optimizer_without_a_learning_rate() -> None:
    """Its updates are taken to stay as they are."""
    watch = PrefixWatch(20)
    _train(watch, WithoutRate([torch.nn.Parameter(torch.tensor([1.0, 2.0**-10] * 8))]))
    found = watch.read_prefix()
    assert found.rates_known
    assert found.shares["bf16"].now == found.shares["bf16"].rest == pytest.approx(0.5)


STEPS = 300
Make = Callable[[Any], Any]
# Where updates shrink as the loss falls, what a prefix says is a floor.
SCHEDULES: dict[str, tuple[Make, Make, bool]] = {
    "AdamW, one cycle": (
        lambda p: AdamW(p, lr=2e-3),
        lambda o: lr_scheduler.OneCycleLR(o, 2e-3, total_steps=STEPS),
        False,
    ),
    "SGD, cosine": (
        lambda p: SGD(p, lr=0.05),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
        True,
    ),
    "AdamW, constant": (lambda p: AdamW(p, lr=1e-3), lambda o: lr_scheduler.ConstantLR(o, 1.0), True),
}


def _watch(make: Any, schedule: Any, steps: int, probes: range | None = None) -> WatchedFirstSteps:
    """Return what is seen of some steps of a small training."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = make(layers.parameters())
    scheduler = schedule(optimizer)
    watch = PrefixWatch(steps, total=STEPS, probes=probes)
    for _ in range(steps):
        optimizer.zero_grad()
        batch = torch.randn(16, 8)
        torch.nn.functional.cross_entropy(layers(batch), batch[:, :4].argmax(1)).backward()
        optimizer.step()
        scheduler.step()
    watch.close()
    return watch.read_prefix()


@pytest.mark.parametrize(("make", "schedule", "is_floor"), SCHEDULES.values(), ids=SCHEDULES)
def test_the_rest_of_the_schedule_is_counted(make: Make, schedule: Make, is_floor: bool) -> None:
    """A prefix, and its schedule, give the share that the whole training counts itself, or a lower bound of it."""
    prefix, whole = _watch(make, schedule, 30), _watch(make, schedule, STEPS, range(30, STEPS, 15))
    rest, counted = prefix.shares["bf16"].rest, whole.shares["bf16"].now
    assert prefix.is_floor is is_floor
    assert 0 < rest <= counted if is_floor else rest == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize(
    ("facts", "total", "source"),
    [
        ({"loops": [40, 3]}, 120, "the loops around a step, 3 x 40"),
        ({"planned": 90}, 90, "the trainer"),
        ({"loops": [40, 3], "total": 70}, 70, "--steps"),
        ({}, None, ""),
    ],
)
def test_the_length_of_a_training_without_a_scheduler(
    facts: dict[str, Any], total: int | None, source: str
) -> None:
    """The state is followed to that end, and over 10,000 steps where nobody says it."""
    param = torch.nn.Parameter(torch.ones(8))
    watch = PrefixWatch(20)
    for name, value in facts.items():
        setattr(watch, name, value)
    optimizer = Adam([param])
    for _ in range(20):
        param.grad = torch.linspace(0.5, 1.0, 8)
        optimizer.step()
    watch.close()
    found = watch.read_prefix()
    assert (found.total, found.total_from) == (total, source)
    assert found.state_errors["bf16"].steps == (10_000 if total is None else total - 20)


@pytest.mark.parametrize("make", [Adam, AdamW, RAdam, NAdam, Adagrad, RMSprop])
def test_an_optimizer_divides_by_zero_in_fp16(make: Any) -> None:
    """Where eps and the second moment are zero in the type; a gradient of zero gives 0 / 0, which is no number."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = make([param], lr=0.1, eps=1e-8)
    param.grad = torch.tensor([1e-6, 1e-6, 1.0, 0.0])
    optimizer.step()
    assert float(share_of_steps_divided_by_zero(optimizer, torch.float16)) == 0.75
    assert float(share_of_steps_divided_by_zero(optimizer, torch.bfloat16)) == 0.0
    optimizer.param_groups[0]["eps"] = 1e-4
    assert float(share_of_steps_divided_by_zero(optimizer, torch.float16)) == 0.0
