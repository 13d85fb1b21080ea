"""Overflow under `amp.scale_loss`: which steps are skipped, and what happens to the scale and the gradients."""

import math

import pytest
import torch
from torch import nn

from ampcompare.apex import amp
from ampcompare.apex.amp.scaler import LossScaler
from tests.apex.amp.small_net import backward, grads, start


def test_skip_drops_master_gradients() -> None:
    """A skipped step leaves master gradients None, so that model.zero_grad() is enough."""
    model, optimizer = start("O2")
    backward(model, optimizer, math.inf)
    optimizer.step()
    assert all(p.grad is None for p in optimizer._amp_stash.all_fp32_from_fp16_params)


def test_delay_overflow_check_freezes_the_scale() -> None:
    """With delay_overflow_check gradients are unscaled, but nothing is skipped and the counter rests."""
    model, optimizer = start("O2")
    backward(model, optimizer, delay_overflow_check=True)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}
    assert 0 < grads(optimizer)[0].abs().max() < 1


@pytest.mark.parametrize("strict", [False, True])
def test_large_finite_gradients(strict: bool) -> None:
    """Finite gradients whose sum leaves fp32 are not an overflow, except in strict mode, which sums (deviation 33)."""
    param = nn.Parameter(torch.zeros(4))
    model = nn.Module()
    model.p = param
    optimizer = torch.optim.SGD([param], lr=0.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, strict=strict)
    with amp.scale_loss(torch.zeros(()), optimizer):
        param.grad = torch.full((4,), 2e38)
    assert (amp._amp_state.loss_scalers[0].loss_scale() == 32768.0) is strict


@pytest.mark.parametrize("strict", [False, True])
def test_gradients_of_a_skipped_step(strict: bool) -> None:
    """An overflow leaves all gradients unscaled; in strict mode those up to the first bad one, as without kernels."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    model = nn.ParameterList(params)
    optimizer = torch.optim.SGD(params, lr=0.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, strict=strict)
    with amp.scale_loss(torch.zeros(()), optimizer):
        for param, value in zip(params, (65536.0, math.inf, 65536.0), strict=True):
            param.grad = torch.full((2,), value)
    assert [p.grad[0].item() for p in params if p.grad is not None] == [
        1.0,
        math.inf,
        65536.0 if strict else 1.0,
    ]


@pytest.mark.parametrize("stashed", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_unscale_of_a_scaler_with_a_bad_gradient(strict: bool, stashed: bool) -> None:
    """`LossScaler.unscale` and its twin with a stash write all masters; in strict mode those before the bad one."""
    amp._amp_state.strict = strict
    scaler = LossScaler("dynamic")
    model = [torch.full((2,), value) for value in (65536.0, math.inf, 65536.0)]
    masters = [torch.full((2,), 7.0) for _ in model]
    if stashed:
        scaler.unscale_with_stashed(model, [torch.ones(2) for _ in model], masters)
    else:
        scaler.unscale(model, masters, 1.0)
    one = 2.0 if stashed else 1.0
    assert [m[0].item() for m in masters] == ([one, 7.0, 7.0] if strict else [one, math.inf, one])
    assert scaler.update_scale()
