"""Backward passes of a script outside of `scale_loss`, next to those inside."""

import pytest
import torch
from torch import nn

from tests.script.small_script import ARMS, Make

HALF = "half:master_weights,loss_scale=64"


@pytest.mark.parametrize("arm", [ARMS["fp16"], HALF])
@pytest.mark.parametrize("case", ["block first", "plain first", "delayed"])
def test_a_plain_backward_pass_adds_true_gradients(script_amp: Make, arm: str, case: str) -> None:
    """To those of a block, and in any order; alone it is a step as well."""
    amp, model = script_amp(arm), nn.Linear(6, 3, bias=False)
    expected = model.weight.detach().clone()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.25))
    x = torch.ones(1, 6)
    if case == "plain first":
        (2 * model(x).float()).sum().backward()
    with amp.scale_loss(model(x).float().sum(), optimizer, delay_unscale=case == "delayed") as scaled:
        scaled.backward()
    if case != "plain first":
        (2 * model(x).float()).sum().backward()
    optimizer.step()
    masters = next(iter(amp.master_params(optimizer)))
    after = expected.half().float() if arm == HALF else expected
    assert torch.equal(masters, after - 0.75)
    optimizer.zero_grad()
    (2 * model(x).float()).sum().backward()
    optimizer.step()
    assert torch.equal(masters, after - 0.75 - 0.5)


def test_a_plain_backward_pass_of_another_model_changes_nothing(script_amp: Make) -> None:
    amp, model, other = script_amp(ARMS["fp16"]), nn.Linear(6, 3, bias=False), nn.Linear(6, 3)
    before = model.weight.detach().clone()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(1, 6)).float().sum(), optimizer) as scaled:
            scaled.backward()
        other(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 2)
