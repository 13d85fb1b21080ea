"""Outcomes that stay on the device: read together, and settled in order."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampcompare.training.precision.base import LateStepOutcomes, make_precision
from tests.host_reads import HostReads

X = torch.linspace(-1, 1, 24).reshape(6, 4)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the lists that were read from the device."""
    lengths: list[int] = []
    tolist = Tensor.tolist

    def counted(self: Tensor) -> Any:
        lengths.append(self.numel())
        return tolist(self)

    monkeypatch.setattr(Tensor, "tolist", counted)
    return lengths


def test_a_block_is_one_transfer(transfers: list[int]) -> None:
    """The first look at any of twenty outcomes reads the scalars of all, and settles them in the order of the steps."""
    outcomes, order = LateStepOutcomes(), []

    def step(place: int) -> Any:
        def settle(values: list[float]) -> Any:
            order.append(place)
            return (values[0] == 0,), (values[1],)

        return outcomes.outcome_of_step([torch.tensor(float(place == 3)), torch.tensor(2.0**place)], settle)

    steps = [step(place) for place in range(20)]
    assert steps[7].loss_scales == (128.0,)
    assert [outcome.applied for outcome in steps].count((False,)) == 1
    assert (steps[3].applied, steps[19].loss_scales) == ((False,), (2.0**19,))
    assert (transfers, order) == ([40], list(range(20)))


@pytest.mark.parametrize("arm", ["half:dynamic", "half:bn_fp32,dynamic", "half:bf16,bn_fp32,dynamic"])
def test_a_dynamic_scale_without_amp_reads_once_a_step(transfers: list[int], arm: str) -> None:
    """One transfer tells of all dtypes and all optimizers of an update."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    precision = make_precision(f"{arm},init_scale=256")
    optimizers = [SGD(list(model.parameters())[place::2], lr=0.1) for place in range(2)]
    (model,), prepared = precision.prepare([model], optimizers)
    with HostReads() as reads:
        for _ in range(3):
            precision.backward(model(X).float().square().mean(), prepared)
            assert precision.step(*prepared).applied == (True, True)
    assert (reads.count, len(transfers)) == (0, 3)
