"""The one loop against a hand-written one, what it records, and learning rates as functions of the step."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from ampcompare.results.records.step import StepRecord
from ampcompare.settings.recipe import ScheduleConfig
from ampcompare.training.assemble import make_rate_factor
from ampcompare.training.loop import Loop
from ampcompare.training.meters import HostClock
from ampcompare.training.parallel.replication import SingleProcess
from ampcompare.training.precision.base import learning_rate_of, make_precision
from tests.host_reads import HostReads


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(count: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(5)
    return [
        (torch.randn(size, 4, generator=draws), torch.randint(0, 3, (size,), generator=draws))
        for _ in range(count)
    ]


def loss_of(models: Sequence[nn.Module], batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(models[0](batch[0]).float(), batch[1])


def make_loop(arm: str = "fp32", **options: Any) -> Loop:
    precision = make_precision(arm)
    model = net()
    models, optimizers = precision.prepare([model], [SGD(model.parameters(), lr=0.1, momentum=0.9)])
    return Loop(models, optimizers, precision, SingleProcess(), loss_of, HostClock(), **options)


def records_of(loop: Loop, data: list[tuple[Tensor, Tensor]]) -> list[StepRecord]:
    return list(itertools.chain.from_iterable(loop.run(data, epoch=0)))


class CountingClock(HostClock):
    """A clock whose marks are the integers, and whose device is idle from each end to the next start."""

    def __init__(self) -> None:
        self.marks = itertools.count()
        self.mark = lambda: next(self.marks)  # type: ignore[method-assign]

    def idle_seconds(self, seconds_waited: float, end: Any, start: Any) -> float:
        return -1.0 if end is None else 10 * end + start


def test_the_wait_between_two_steps_is_that_of_the_clock() -> None:
    """Each step of a block but the first is told the end of the one before and its own start."""
    loop = make_loop(drain_every=3)
    loop.clock = CountingClock()
    assert [record.data_seconds for record in records_of(loop, batches(5))] == [-1, 12, 34, -1, 78]


def weights(loop: Loop) -> list[Tensor]:
    return [param.detach().clone() for param in loop.models[0].parameters()]


def test_fp32_equals_a_hand_written_loop_to_the_last_bit() -> None:
    """Losses and weights are those of the plain PyTorch loop."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches(7):
        loss = loss_of([model], batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    loop = make_loop(drain_every=3)
    records = records_of(loop, batches(7))
    assert [record.loss for record in records] == losses
    assert [record.step for record in records] == list(range(7))
    assert all(torch.equal(a, b) for a, b in zip(weights(loop), model.parameters(), strict=True))


def test_native_fp16_equals_a_hand_written_loop_to_the_last_bit() -> None:
    """The seam adds no arithmetic to torch.amp as its documentation shows it."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    for batch in batches(5):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of([model], batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    loop = make_loop("native:fp16")
    records_of(loop, batches(5))
    assert all(torch.equal(a, b) for a, b in zip(weights(loop), model.parameters(), strict=True))


@pytest.mark.parametrize("drain_every", [1, 2, 5, 100])
def test_draining_rhythm_changes_no_record(drain_every: int) -> None:
    """Blocks of any size hold the same losses, scales and flags in the same order."""
    data = batches(7)
    data[2] = (data[2][0] * math.inf, data[2][1])
    blocks = list(make_loop("native:fp16,growth_interval=2", drain_every=drain_every).run(data, epoch=1))
    assert max(len(block) for block in blocks) <= drain_every
    flat = list(itertools.chain.from_iterable(blocks))
    once = records_of(make_loop("native:fp16,growth_interval=2", drain_every=7), data)
    assert [(r.step, repr(r.loss), r.loss_scales_before, r.loss_scales, r.applied) for r in flat] == [
        (r.step, repr(r.loss), r.loss_scales_before, r.loss_scales, r.applied) for r in once
    ]
    assert {record.epoch for record in flat} == {1}


def test_scale_before_and_after_are_those_of_gradscaler() -> None:
    """The replayed scales are what `GradScaler.get_scale` says at each step, through growth and overflow."""
    data = batches(9)
    for bad in (0, 5):
        data[bad] = (data[bad][0] * math.inf, data[bad][1])
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=3000.1, growth_factor=1.7, backoff_factor=0.3, growth_interval=2
    )
    expected = []
    for batch in data:
        before = scaler.get_scale()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of([model], batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        expected.append(((before,), (scaler.get_scale(),)))
    arm = "native:fp16,init_scale=3000.1,growth_factor=1.7,backoff_factor=0.3,growth_interval=2"
    records = records_of(make_loop(arm), data)
    assert [(record.loss_scales_before, record.loss_scales) for record in records] == expected
    assert [record.applied for record in records] == [(step not in (0, 5),) for step in range(9)]


def test_schedule_sets_the_rate_of_each_step() -> None:
    seen: list[float] = []

    class Watched(SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(self.param_groups[0]["lr"])
            return super().step(closure)

    model = net()
    loop = Loop(
        [model],
        [Watched(model.parameters(), lr=0.5)],
        make_precision("fp32"),
        SingleProcess(),
        loss_of,
        HostClock(),
        schedule=lambda step: 1 / (step + 1),
        base_lrs=[[0.5]],
        drain_every=2,
    )
    records_of(loop, batches(3))
    assert seen == [0.5, 0.25, 0.5 / 3]


def test_an_optimizer_without_a_rate_is_trained() -> None:
    """Its groups have no lr that a schedule could set, and get none."""

    class SignDescent(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param -= 0.01 * param.grad.sign()

    model = net()
    optimizer = SignDescent(model.parameters(), {})
    rates = [[learning_rate_of(group) for group in optimizer.param_groups]]
    loop = Loop(
        [model], [optimizer], make_precision("fp32"), SingleProcess(), loss_of, HostClock(),
        schedule=lambda step: 1 / (step + 1), base_lrs=rates,
    )  # fmt: skip
    losses = [record.loss for record in records_of(loop, batches(3))]
    assert len(losses) == 3
    assert rates == [[1.0]]
    assert "lr" not in optimizer.param_groups[0]


@pytest.mark.parametrize("arm", ["fp32", "native:bf16", "half", "half:loss_scale=8"])
def test_between_drains_nothing_is_read_from_the_device(arm: str) -> None:
    """Where the backend itself reads nothing, the loop reads nothing either until a block is full."""
    loop = make_loop(arm, drain_every=8)
    records_of(loop, batches(8))  # first steps set up the optimizer's state
    with HostReads() as reads:
        steps = loop.run(batches(7), epoch=0)
        original, loop._drain_steps = loop._drain_steps, lambda pending, epoch: []  # type: ignore[method-assign]
        list(steps)
        assert reads.count == 0
        loop._drain_steps = original  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["constant", "step", "cosine"])
def test_warm_up_is_linear(name: str) -> None:
    """The rate reaches its base at the end of the warm-up, and no step trains at rate 0."""
    config = ScheduleConfig(name=name, warmup_epochs=2, step_epochs=100)  # type: ignore[arg-type]
    factor = make_rate_factor(config, steps_per_epoch=5, total_steps=100)
    assert factor is not None
    assert [factor(step) for step in range(10)] == [(step + 1) / 10 for step in range(10)]
    assert factor(10) == 1.0


def test_constant_without_warm_up_needs_no_function() -> None:
    """Nothing is set at any step."""
    assert (
        make_rate_factor(ScheduleConfig(name="constant", warmup_epochs=0), steps_per_epoch=5, total_steps=10)
        is None
    )


def test_step_schedule_drops_by_epochs() -> None:
    config = ScheduleConfig(name="step", warmup_epochs=0, step_epochs=2, gamma=0.5)
    factor = make_rate_factor(config, steps_per_epoch=3, total_steps=100)
    assert factor is not None
    assert [factor(step) for step in (0, 5, 6, 11, 12)] == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_cosine_matches_torch() -> None:
    config = ScheduleConfig(name="cosine", warmup_epochs=0)
    factor = make_rate_factor(config, steps_per_epoch=4, total_steps=20)
    assert factor is not None
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for step in range(20):
        assert factor(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()
