"""A script that casts its live model between steps, as to save it in 16 bits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn


def trained(behind: Any, arm: str, *, saves: bool) -> tuple[list[Tensor], list[float]]:
    """Return weights and losses of some steps under an arm, between which the model is saved in fp16, if asked for."""
    torch.manual_seed(0)
    behind(arm)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(6):
        loss = model(torch.linspace(-1, 1, 24).reshape(6, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if saves and step == 4:  # between the backward pass and the step
            model.float()
        optimizer.step()
        losses.append(loss.item())
        if saves and step == 2:
            model[0].half()
            assert model[0].weight.dtype is torch.float16
            model.float()
            assert {one.dtype for one in model.parameters()} == {torch.float32}
    weights = [one.detach().clone() for one in model.parameters()]
    behind.end()
    return weights, losses


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
@pytest.mark.parametrize("arm", ["apex:O2", "apex:O3", "half", "half:bf16,masters=fp32"])
def test_the_model_has_the_types_of_the_arm_again(behind: Any, arm: str) -> None:
    """And the weights of a training without it, since a cast to fp32 and back changes no number."""
    if "bf16" in arm:  # a cast to fp16 rounds others
        weights, losses = trained(behind, arm, saves=True)
        assert losses == pytest.approx(trained(behind, arm, saves=False)[1], rel=0.05)
        assert weights[0].dtype is torch.bfloat16
        return
    weights, losses = trained(behind, arm, saves=True)
    others, expected = trained(behind, arm, saves=False)
    assert losses == expected
    for one, other in zip(weights, others, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
