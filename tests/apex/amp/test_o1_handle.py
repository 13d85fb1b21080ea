"""Switching O1's casts on and off: the handle, `init`, `disable_casts` and the step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampcompare.apex import DeprecatedFeatureWarning, amp
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
    with pytest.warns(DeprecatedFeatureWarning) as caught:
        doubled = amp.half_function(lambda value: value * 2)
    assert caught[0].filename == __file__, "the line of the script, not of the engine"
    assert doubled(torch.ones(2)).dtype == HALF
    amp.init(enabled=False)
    assert doubled(torch.ones(2)).dtype == FLOAT
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == HALF


def _grown(amp_: Any, wrapped: bool, value: float) -> list[float]:
    """Return the weight after each of three steps by the API before `initialize`, the second with a given input."""
    handle = amp_.init(loss_scale="dynamic")
    weight = nn.Parameter(torch.full((1,), 3.0))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    if wrapped:
        optimizer = handle.wrap_optimizer(optimizer)
    found = []
    for number in (1.0, value, 1.0):
        optimizer.zero_grad()
        loss = (weight * number).sum()
        with optimizer.scale_loss(loss) if wrapped else handle.scale_loss(loss, optimizer) as scaled_loss:
            assert scaled_loss.item() != loss.item()
            scaled_loss.backward()
        optimizer.step()
        found.append(weight.item())
    return found


@pytest.mark.parametrize("wrapped", [True, False])
def test_the_api_before_initialize_trains(handle: Any, wrapped: bool) -> None:
    """Gradients are unscaled, one that overflows skips its step alone (deviation 42)."""
    assert _grown(amp, wrapped, 1.0) == [2.5, 2.0, 1.5]
    assert _grown(amp, wrapped, 1e36) == [2.5, 2.5, 2.0]


def test_gradients_of_several_losses_add_up(handle: Any) -> None:
    """Each loss has a scaler, and unscaled gradients of the first are left as they are; one loss too many is named."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = handle.wrap_optimizer(torch.optim.SGD([weight], lr=1.0), num_loss=2)
    for factor in (1.0, 2.0):
        with optimizer.scale_loss((weight * factor).sum()) as scaled_loss:
            scaled_loss.backward()
    assert weight.grad is not None
    assert weight.grad.item() == 3.0
    with pytest.raises(RuntimeError, match="num_loss=2"):
        optimizer.scale_loss(weight.sum())
    optimizer.step()
    assert weight.item() == -2.0
    with handle._disable_casts(), optimizer.scale_loss("loss") as loss:
        assert loss == "loss"
    with amp.init(enabled=False).wrap_optimizer(optimizer).scale_loss("loss") as loss:
        assert loss == "loss"


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


def test_the_api_before_initialize_strict(handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In strict mode it raises and points to the new API, as Apex 25.05 does."""
    monkeypatch.setattr(amp._amp_state, "strict", True)
    with pytest.raises(RuntimeError, match=r"amp\.initialize"), handle.scale_loss(torch.ones(()), None):
        pass


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
