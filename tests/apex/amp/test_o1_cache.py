"""The cache of O1's casts of weights: one cast for several uses, and never a stale one."""

from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.apex import amp
from tests.apex.amp.o1_dtypes import weights


@pytest.mark.parametrize("strict", [False, True])
def test_stale_casts_after_loading(strict: bool) -> None:
    """Weights that were loaded are used; in strict mode evaluation keeps the old casts (deviation 16)."""
    model, x = weights()
    amp.initialize(model, opt_level="O1", verbosity=0, strict=strict)
    state = {"weight": torch.full((4, 4), 3.0)}
    for grad_mode in (False, True):
        with torch.set_grad_enabled(grad_mode):
            with torch.no_grad():
                model.weight.fill_(1.0)
            amp._amp_state.handle._clear_cache()
            model(x)
            model.load_state_dict(state)
            assert model(x).mean().item() == (1.0 if strict else 3.0)


def test_averaged_weights_are_used_in_evaluation(handle: Any) -> None:
    """Weights swapped in through `.data` take effect at once under no_grad, and so does a replaced `.data`."""
    model, x = weights()
    with torch.no_grad():
        for value in (1.0, 2.0):
            model.weight.data.copy_(torch.full((4, 4), value))
            assert model(x).mean().item() == value
            model.weight.data = torch.full((4, 4), value + 0.5)
            assert model(x).mean().item() == value + 0.5
    model(x)
    model.weight.data = torch.full((4, 4), 4.0)
    assert model(x).mean().item() == 4.0


def test_training_without_scale_loss_sees_new_weights() -> None:
    """An optimizer step drops the casts of the weights, also for scripts that never call scale_loss."""
    model, x = weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    model(x).sum().backward()
    before = model(x).detach()
    optimizer.step()
    assert not torch.equal(model(x), before)


def test_frozen_then_trained_weight(handle: Any) -> None:
    """A cast made while the weight was frozen, or under no_grad, is not reused for training."""
    model, x = weights()
    model.weight.requires_grad_(False)
    model(x)
    model.weight.requires_grad_(True)
    model(x).sum().backward()
    assert model.weight.grad is not None


def test_remove_cache_and_no_caching() -> None:
    """One cast can be forgotten; `enable_caching=False` keeps none."""
    model, x = weights()
    handle = amp.init()
    model(x)
    assert handle.has_cache
    assert len(handle.cache) == 1
    handle.remove_cache(model.weight)
    assert not handle.cache
    amp._amp_state.close()
    handle = amp.init(enable_caching=False)
    model(x)
    assert not handle.has_cache
    assert not handle.cache


def test_a_cast_that_lost_its_parameter_is_refused(handle: Any) -> None:
    """A cached cast whose gradient would miss the parameter raises RuntimeError."""
    model, x = weights()
    other = nn.Parameter(torch.ones(4, 4))
    model(x)
    key = id(model.weight)
    weight, _, version, address = handle.cache[key]
    handle.cache[key] = (weight, other.half(), version, address)
    with pytest.raises(RuntimeError, match="_clear_cache"):
        model(x)
