"""`amp.scale_loss`: unscaled gradients, accumulation over several blocks, and what an exception leaves."""

import pytest
import torch
from torch import nn

from ampcompare.apex import amp
from ampcompare.apex.amp._engine.optimizer_state import AmpOptimizerState
from ampcompare.base.errors import AmpCompareError
from tests.apex.amp.small_net import LEVELS, backward, grads, loss_of, start


@pytest.mark.parametrize("strict", [False, True])
def test_accumulation_at_a_static_scale_of_one(strict: bool) -> None:
    """Master weights at scale 1 accumulate gradients of fp32 parameters; strict mode loses them (deviation 4)."""
    model, optimizer = start("O2", loss_scale=1.0, strict=strict)
    backward(model, optimizer)
    once = model.bn.weight.grad.clone()
    backward(model, optimizer)
    torch.testing.assert_close(model.bn.weight.grad, once if strict else 2 * once)


@pytest.mark.parametrize("strict", [False, True])
def test_first_passes_delayed(strict: bool) -> None:
    """Delayed passes before any zero_grad keep gradients of fp32 parameters; strict loses them (deviation 40)."""
    model, optimizer = start("O2", strict=strict)
    backward(model, optimizer, delay_unscale=True)
    backward(model, optimizer)
    if strict:
        assert model.bn.weight.grad is None
    else:
        assert model.bn.weight.grad is not None


@pytest.mark.parametrize("strict", [False, True])
def test_a_tuple_of_optimizers(strict: bool) -> None:
    """A tuple of optimizers accumulates like a list; strict divides old gradients again (deviation 23)."""
    model, optimizer = start("O1", strict=strict)
    backward(model, (optimizer,))
    once = model.fc.weight.grad.clone()
    backward(model, (optimizer,))
    torch.testing.assert_close(
        model.fc.weight.grad, once + once / 65536 if strict else 2 * once, rtol=1e-3, atol=1e-7
    )


@pytest.mark.parametrize("level", LEVELS)
def test_exception_in_the_block(level: str) -> None:
    """Gradients of earlier blocks come back when a later block raises; strict mode leaves them away (deviation 14)."""
    model, optimizer = start(level, loss_scale="dynamic")
    backward(model, optimizer)
    before = [g.clone() for g in grads(optimizer)]
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model), optimizer) as scaled:
        _ = scaled.backward() or 1 / 0
    for got, want in zip(grads(optimizer), before, strict=True):
        assert torch.equal(got, want)
    backward(model, optimizer)
    optimizer.step()


def test_exception_in_the_block_strict() -> None:
    """In strict mode an exception inside the block loses stashed gradients from view."""
    model, optimizer = start("O1", strict=True)
    backward(model, optimizer)
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model), optimizer):
        _ = 1 / 0
    assert model.fc.weight.grad is None


@pytest.mark.parametrize("level", ["O0", "O3"])
@pytest.mark.parametrize("kind, strict", [("failed", True), ("nested", True), ("nested", False)])
def test_what_a_pass_lost_does_not_come_back(level: str, kind: str, strict: bool) -> None:
    """Gradients lost in a failed block (strict) or nested ones stay lost: Apex 25.05 left None, None, 3 and 2."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0, strict=strict)
    first, last = model
    x = torch.ones(1, 2)
    with amp.scale_loss(model(x).sum(), optimizer) as scaled:
        scaled.backward()
    if kind == "failed":
        with pytest.raises(KeyError), amp.scale_loss(model(x).sum(), optimizer):
            raise KeyError
    else:
        with amp.scale_loss(model(x).sum(), optimizer), amp.scale_loss(model(x).sum(), optimizer) as scaled:
            scaled.backward()
    for param in model.parameters():
        param.grad = None
    last.weight.grad = torch.ones_like(last.weight)
    with amp.scale_loss(last(x.to(last.weight.dtype)).float().sum() * 2, optimizer) as scaled:
        scaled.backward()
    assert first.weight.grad is None
    assert first.bias.grad is None
    assert last.weight.grad.tolist() == [[3.0, 3.0]]
    assert last.bias.grad.tolist() == [2.0]


def test_errors_of_scale_loss() -> None:
    """Wrong order, wrong loss_id and unknown optimizers raise Apex's types, with ampcompare's family."""
    loss = torch.ones(())
    with pytest.raises(RuntimeError, match=r"amp\.initialize") as caught, amp.scale_loss(loss, None):
        pass
    assert isinstance(caught.value, AmpCompareError)
    _model, optimizer = start("O2")
    with pytest.raises(IndexError, match="num_losses=2"), amp.scale_loss(loss, optimizer, loss_id=1):
        pass
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with (
        pytest.raises(AttributeError, match=r"did not go through amp\.initialize"),
        amp.scale_loss(loss, stranger),
    ):
        pass
    start("O2", num_losses=0)
    with pytest.raises(IndexError), amp.scale_loss(loss, optimizer):
        pass


def test_short_circuit_asks_nothing_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a static scale of 1 without masters the loss comes back in fp32, and optimizers are not looked at."""
    # another test of this process may have made some
    monkeypatch.setattr(AmpOptimizerState, "any_masters", False)
    start("O0")
    loss = torch.ones((), dtype=torch.float16)
    with amp.scale_loss(loss, "no optimizer") as scaled:
        assert scaled.dtype == torch.float32
