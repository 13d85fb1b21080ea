"""Back to the last good state: all of it, for every arm, a limited number of times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampcompare.precision.base import owned_params
from ampcompare.precision.factory import make_precision
from ampcompare.training.average import WeightAverage
from ampcompare.training.rollback import Rollback, Snapshot

ARMS = [
    "fp32",
    "apex:O0,engine=compat",
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "apex:O3,loss_scale=dynamic,engine=compat",
    "native:fp16,growth_interval=2",
    "native:bf16",
    "half",
    "half:bn_fp32",
    "half:master_weights,dynamic,growth_interval=2",
]
X = torch.linspace(-1, 1, 24).reshape(6, 4)


class Run:
    """A prepared model with momentum and an average."""

    def __init__(self, arm: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.average = WeightAverage([model], 0.5)
        self.precision = make_precision(arm)
        owned = owned_params(optimizer)
        (self.model,), (self.optimizer,) = self.precision.prepare([model], [optimizer])
        self.average.follow([self.model], [self.optimizer], owned)

    def step(self, x: Tensor = X) -> None:
        with self.precision.autocast():
            loss = self.model(x).float().square().mean()
        self.precision.backward(loss, [self.optimizer])
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad()
        self.average.update()

    def everything(self) -> list[Any]:
        """All that a snapshot holds, as plain values."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *owned_params(self.optimizer)]
        (averaged,) = self.average.state_dict()["models"]
        momenta = [self.optimizer.state[param]["momentum_buffer"] for param in owned_params(self.optimizer)]
        return [[t.tolist() for t in (*tensors, *averaged.values(), *momenta)], self.precision.state_dict()]

    def snapshot(self) -> Snapshot:
        return Snapshot([self.model], [self.optimizer], self.precision, self.average)


@pytest.mark.parametrize("arm", ARMS)
def test_everything_comes_back_and_goes_on_alike(arm: str) -> None:
    """After NaN and overflow a restored run is where it was, twice, and its next steps have the same bits."""
    run = Run(arm)
    run.step()
    run.step()
    before = run.everything()
    kept = run.snapshot()
    run.step()
    run.step()
    after = run.everything()
    assert after != before
    for _ in range(2):
        run.step(X * float("inf"))
        with torch.no_grad():
            for param in (*run.model.parameters(), *owned_params(run.optimizer)):
                param.fill_(float("nan"))
        kept.restore()
        assert run.everything() == before
        run.step()
        run.step()
        assert run.everything() == after


@pytest.mark.parametrize("arm", ARMS)
def test_a_snapshot_from_before_the_first_step_starts_anew(arm: str) -> None:
    """Apex makes masters in the first backward pass; a snapshot from before it gives the first two steps again."""
    run = Run(arm)
    kept = run.snapshot()
    run.step()
    run.step()
    after = run.everything()
    run.step(X * float("nan"))
    kept.restore()
    run.step()
    run.step()
    assert run.everything() == after


def test_it_goes_back_so_often_and_no_more() -> None:
    """A run that diverges again and again ends; states between two that are kept are not."""
    run = Run("fp32")
    back = Rollback([run.model], [run.optimizer], run.precision, every=2, most=2)
    back.keep(0)
    weights = []
    for step in range(1, 4):
        run.step()
        back.keep(step)
        weights.append(run.model[0].weight.tolist())  # type: ignore[index, union-attr, operator]
    assert back.go_back(3)
    assert run.model[0].weight.tolist() == weights[1]  # type: ignore[index, union-attr, operator]
    assert back.go_back(7)
    assert not back.go_back(9)
    assert back.steps == [3, 7]
    again = Rollback([run.model], [run.optimizer], run.precision, every=2, most=2)
    again.load_state_dict(back.state_dict())
    again.keep(9)
    assert not again.go_back(9)


def test_without_a_good_state_there_is_no_way_back() -> None:
    """Before the first state is kept, going back is refused."""
    run = Run("fp32")
    assert not Rollback([run.model], [run.optimizer], run.precision, every=2, most=2).go_back(1)
