"""Types that an arm chooses one by one: where they are held, and that numbers follow them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from ampcompare.training.precision.base import Precision, make_precision

X = torch.linspace(-1, 1, 24).reshape(6, 4)


def start(arm: str, make: Any = Adam) -> tuple[Precision, nn.Module, Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    precision = make_precision(arm)
    (model,), (optimizer,) = precision.prepare([model], [make(model.parameters(), lr=2.0**-10)])
    return precision, model, optimizer


def step(precision: Precision, model: nn.Module, optimizer: Optimizer, *batches: Tensor) -> None:
    """One update, of one or more micro-batches."""
    for index, batch in enumerate(batches or (X,)):
        with precision.autocast():
            loss = model(batch).float().square().mean() / max(1, len(batches))
        precision.backward(loss, [optimizer], delay_unscale=index < len(batches) - 1)
    precision.step(optimizer)
    optimizer.zero_grad()


def test_a_step_without_masters_is_one_in_fp32_rounded_once() -> None:
    """The wide step of bf16 weights has the bits of Adam on fp32 copies, written by hand."""
    precision, model, optimizer = start("half:bf16,state=fp32")
    weight = model[0].weight  # type: ignore[index]
    copy = weight.detach().float().requires_grad_()
    plain = Adam([copy], lr=2.0**-10)
    for _ in range(3):
        precision.backward(model(X).square().mean(), [optimizer])
        copy.grad = weight.grad.float()  # type: ignore[union-attr]
        plain.step()
        precision.step(optimizer)
        optimizer.zero_grad()
        copy.data = copy.detach().bfloat16().float()
        assert torch.equal(weight.float(), copy.detach())  # type: ignore[operator]


def test_gradients_add_up_in_fp32() -> None:
    """Micro-batches that cancel to a small rest keep it in fp32, where bf16 loses it."""
    big, small = torch.full((1, 4), 256.0), torch.full((1, 4), 0.5)
    sums = {}
    for arm in ("half:bf16,masters=fp32", "half:bf16,masters=fp32,grads=fp32"):
        torch.manual_seed(0)
        precision = make_precision(arm)
        layer = nn.Linear(4, 1, bias=False)
        (model,), (optimizer,) = precision.prepare([layer], [SGD(layer.parameters(), lr=0.1)])
        for index, batch in enumerate((big, small)):
            precision.backward(model(batch).sum(), [optimizer], delay_unscale=index == 0)
        (param,) = precision.unscale(optimizer)
        sums[arm] = param.grad[0, 0].item()  # type: ignore[index]
    assert list(sums.values()) == [256.0, 256.5]


def test_a_dropped_update_leaves_no_gradient_behind() -> None:
    """`zero_grad` without a step forgets what micro-batches have added up."""
    precision, model, optimizer = start("half:bf16,masters=fp32,grads=fp32", SGD)
    for _ in range(2):
        precision.backward(model(X).square().mean() * 1e4, [optimizer], delay_unscale=True)
    for param in model.parameters():
        param.grad = None
    optimizer.zero_grad()
    before = [param.detach().clone() for param in model.parameters()]
    precision.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_skipped_step_keeps_compensation_and_state() -> None:
    """An overflow leaves weights, moments and what Kahan keeps as they were."""
    precision, model, optimizer = start("half:kahan,dynamic,init_scale=8,keep_fp32=1")
    step(precision, model, optimizer)
    kept = {
        id(param): {name: value.clone() for name, value in state.items()}
        for param, state in optimizer.state.items()
    }
    before = [param.detach().clone() for param in model.parameters()]
    step(precision, model, optimizer, X * float("inf"))
    assert precision.loss_scales() == (4.0,)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    states = {id(param): state for param, state in optimizer.state.items()}
    assert set(states) == {id(param) for param in model.parameters()}
    for param, old in kept.items():
        assert old.keys() == states[param].keys()
        assert all(torch.equal(value, states[param][name]) for name, value in old.items())
