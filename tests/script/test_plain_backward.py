"""Backward passes of a script outside of `scale_loss`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ampcompare.base.errors import ScalingError
from ampcompare.script.apex_amp import ScriptAmp
from tests.script.small_script import ARMS


def test_a_plain_backward_pass_adds_true_gradients(script_amp: Callable[[str], ScriptAmp]) -> None:
    """After a block it adds to gradients that are unscaled by then, as under Apex; alone it is a step in fp32 range."""
    amp, model = script_amp(ARMS["fp16"]), nn.Linear(6, 3, bias=False)
    expected = model.weight.detach().clone()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.ones(1, 6)
    with amp.scale_loss(model(x).float().sum(), optimizer) as scaled:
        scaled.backward()
    other = 2 * model.weight.sum()
    amp.before_backward([other])
    other.backward()
    optimizer.step()
    assert torch.equal(model.weight, expected - 3)
    optimizer.zero_grad()
    plain = 2 * model.weight.sum()
    amp.before_backward([plain])
    plain.backward()
    optimizer.step()
    assert torch.equal(model.weight, expected - 3 - 2)


def test_a_plain_backward_pass_of_another_model_changes_nothing(script_amp: Callable[[str], ScriptAmp]) -> None:
    """Accumulation continues: what it does not reach stays scaled."""
    amp, model, other = script_amp(ARMS["fp16"]), nn.Linear(6, 3, bias=False), nn.Linear(6, 3)
    before = model.weight.detach().clone()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(1, 6)).float().sum(), optimizer) as scaled:
            scaled.backward()
        amp.before_backward([other(torch.ones(1, 6)).sum()])
    optimizer.step()
    assert torch.equal(model.weight, before - 2)


@pytest.mark.parametrize("case", ["plain first", "delayed", "masters"])
def test_true_gradients_that_meet_scaled_ones_are_refused(script_amp: Callable[[str], ScriptAmp], case: str) -> None:
    """They could not be told apart; the message names the line."""
    arm = "half:master_weights,loss_scale=64" if case == "masters" else ARMS["fp16"]
    amp, model = script_amp(arm), nn.Linear(6, 3)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def plain() -> None:
        loss = model(torch.ones(1, 6)).float().sum()
        amp.before_backward([loss])
        loss.backward()

    def block() -> None:
        loss = model(torch.ones(1, 6)).float().sum()
        with amp.scale_loss(loss, optimizer, delay_unscale=case == "delayed") as scaled:
            scaled.backward()

    first, second = (plain, block) if case == "plain first" else (block, plain)
    first()
    with pytest.raises(ScalingError, match=r"test_plain_backward\.py:\d+: .*loss\.backward\(\)"):
        second()
