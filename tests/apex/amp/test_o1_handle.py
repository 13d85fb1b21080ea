"""Switching O1's casts on and off: the handle, `init`, `disable_casts` and the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampcompare.apex import amp
from tests.apex.amp.o1_dtypes import FLOAT, HALF, weights


def test_deactivate_restores_torch() -> None:
    """Taking patches back leaves every function and method as it was, registered and listed ones included."""
    from torch.nn.modules import rnn

    names = [(F, "linear"), (torch, "mm"), (torch, "sum"), (torch, "cat"), (rnn.RNNBase, "check_input")]
    before = [getattr(module, name) for module, name in names]
    own_names = {name for name in vars(torch.Tensor) if not name.startswith("_cls")}
    amp.register_float_function(torch, "sum")
    amp.register_promote_function(torch, "mm")
    handle = amp.init()
    assert torch.sum is not before[2]
    handle._deactivate()
    assert [getattr(module, name) for module, name in names] == before
    assert {name for name in vars(torch.Tensor) if not name.startswith("_cls")} == own_names
    assert torch.mm(torch.eye(2), torch.eye(2)).dtype == FLOAT


def test_init_twice() -> None:
    """A second init replaces the first one's patches and keeps its registered functions; strict mode stacks."""
    original = torch.mm
    amp.register_float_function(torch, "relu")
    amp.init()
    handle = amp.init()
    assert torch.relu(torch.ones(1).half()).dtype == FLOAT
    handle._deactivate()
    assert torch.mm is original
    amp._amp_state.close()
    amp._amp_state.strict = True
    first = amp.init()
    second = amp.init()
    second._deactivate()
    assert torch.mm is not original
    first._deactivate()
    assert torch.mm is original


def test_disabled_handle() -> None:
    """init(enabled=False) patches nothing and returns a handle that does nothing."""
    original = torch.mm
    handle = amp.init(enabled=False)
    assert torch.mm is original
    assert not handle.is_active()
    assert not handle.has_cache
    with handle._disable_casts(), handle.scale_loss("loss", None) as loss:
        assert loss == "loss"
    handle._clear_cache()
    handle._deactivate()


def test_a_disabled_init_stops_decorated_functions(handle: Any) -> None:
    """After init(enabled=False) decorated functions run as they are, and torch stays patched, as with Apex 25.05."""
    doubled = amp.half_function(lambda value: value * 2)
    assert doubled(torch.ones(2)).dtype == HALF
    amp.init(enabled=False)
    assert doubled(torch.ones(2)).dtype == FLOAT
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == HALF


def test_old_handle_api(handle: Any) -> None:
    """The handle's scale_loss points to the new API; wrap_optimizer passes everything on."""
    with pytest.raises(RuntimeError, match=r"amp\.initialize"):
        handle.scale_loss(torch.ones(()), None)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    wrapped = handle.wrap_optimizer(optimizer)
    assert wrapped.param_groups is optimizer.param_groups
    wrapped.step()
    with pytest.raises(RuntimeError):
        wrapped.scale_loss(torch.ones(()))


def test_disable_casts_nests_and_survives_exceptions(handle: Any) -> None:
    """Inner blocks leave casts off, and an exception turns them on again (deviation 13)."""
    eye = torch.eye(2)
    with amp.disable_casts():
        with amp.disable_casts():
            assert torch.mm(eye, eye).dtype == FLOAT
        assert torch.mm(eye, eye).dtype == FLOAT
    assert torch.mm(eye, eye).dtype == HALF
    with pytest.raises(ZeroDivisionError), amp.disable_casts():
        _ = 1 / 0
    assert handle.is_active()


def test_disable_casts_strict() -> None:
    """In strict mode leaving an inner block turns casts on, and an exception leaves them off."""
    amp._amp_state.strict = True
    handle = amp.init()
    with amp.disable_casts():
        with amp.disable_casts():
            pass
        assert handle.is_active()
    with pytest.raises(ZeroDivisionError), amp.disable_casts():
        _ = 1 / 0
    assert not handle.is_active()


def test_disable_casts_without_o1() -> None:
    """Without a handle disable_casts does nothing; strict mode raises AttributeError (deviation 35)."""
    with amp.disable_casts():
        pass
    amp._amp_state.strict = True
    with pytest.raises(AttributeError), amp.disable_casts():
        pass


def test_steps_run_without_casts() -> None:
    """Inside optimizer.step casts are off; an exception there turns them on again, arguments pass through."""
    seen: list[Any] = []

    class Probe(torch.optim.SGD):
        def step(self, closure: Any = None, flag: int = 0) -> Any:
            seen.append((torch.mm(torch.eye(2), torch.eye(2)).dtype, flag))
            if flag == 2:
                raise ZeroDivisionError
            return "done"

    model, _ = weights()
    optimizer = Probe(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert optimizer.step(flag=1) == "done"
    with pytest.raises(ZeroDivisionError):
        optimizer.step(flag=2)
    assert seen == [(FLOAT, 1), (FLOAT, 2)]
    assert amp._amp_state.handle.is_active()
