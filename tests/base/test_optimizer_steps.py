"""Steps of optimizers as followers see them."""

import contextlib
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from ampcompare.base.optimizer_steps import OptimizerStepEvents
from ampcompare.base.patches import Layer, Subscriptions


class _Outer(torch.optim.Optimizer):
    """An optimizer that steps another one, or fails."""

    def __init__(self, params: Any, *, fails: bool) -> None:
        super().__init__(params, {})
        self.fails = fails
        self._inner = SGD(self.param_groups, 0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._inner.step()
        if self.fails:
            raise MemoryError


@pytest.fixture
def events() -> Iterator[Subscriptions]:
    subscriptions = Subscriptions(Layer.STAND_IN)
    yield subscriptions
    subscriptions.end()


def _parameters() -> list[nn.Parameter]:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    return [param]


def test_steps_inside_of_others_are_no_steps_of_their_own(events: Subscriptions) -> None:
    steps, seen = OptimizerStepEvents(events), []
    steps.call_before_each(lambda optimizer: seen.append((type(optimizer).__name__, steps.is_inside())))
    steps.call_after_each(lambda optimizer: seen.append((type(optimizer).__name__, steps.is_inside())))
    _Outer(_parameters(), fails=False).step()
    assert seen == [("_Outer", True), ("SGD", True), ("SGD", True), ("_Outer", False)]
    assert steps.num_ended == 1


def test_a_step_that_fails_ends_at_the_next_one(events: Subscriptions) -> None:
    steps, optimizer = OptimizerStepEvents(events), _Outer(_parameters(), fails=True)
    with contextlib.suppress(MemoryError):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    assert not steps.is_inside()
    assert steps.num_ended == 1


def test_another_thread_is_outside(events: Subscriptions) -> None:
    steps, seen = OptimizerStepEvents(events), []

    def look(_: Any) -> None:
        thread = Thread(target=lambda: seen.append(steps.is_inside()))
        thread.start()
        thread.join()

    steps.call_before_each(look)
    SGD(_parameters(), 0.1).step()
    assert seen == [False]
