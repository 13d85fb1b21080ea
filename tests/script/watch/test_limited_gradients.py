"""Limits of gradients within a backward pass, which `diagnose` notes where the script scales its loss."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.script.watch.limited_gradients import LimitedScaledGradientsWatch


class Limit(torch.autograd.Function):
    """Limits the gradient of what passes."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.clamp(-0.1, 0.1)


def limit_gradient(param: Tensor) -> None:
    """Limit the gradient of a parameter in place."""
    assert param.grad is not None
    param.grad.data.clamp_(-0.1, 0.1)


@pytest.fixture
def watch() -> Iterator[LimitedScaledGradientsWatch]:
    """Follow this process until the test ends."""
    events, found = Subscriptions(Layer.WATCH), LimitedScaledGradientsWatch()
    found.follow(events)
    yield found
    events.end()


def layer_with_limit(where: str) -> nn.Linear:
    """Return a layer whose gradients are limited in a hook."""
    layer = nn.Linear(2, 2)
    if where == "weight":
        layer.weight.register_hook(lambda g: torch.clamp(g, max=0.1))
    elif where == "module":
        layer.register_full_backward_hook(lambda _, given, __: (given[0].clamp(-1, 1),))
    elif where == "added":
        layer.weight.register_post_accumulate_grad_hook(limit_gradient)
    elif where == "sign":
        layer.weight.register_hook(lambda g: g.clamp(min=0))
    return layer


@pytest.mark.parametrize("where", ["weight", "module", "added", "function"])
def test_lines_that_limit_scaled_gradients(watch: LimitedScaledGradientsWatch, where: str) -> None:
    """A limit is divided by the scale wherever a backward pass calls the script."""
    layer, x = layer_with_limit(where), torch.ones(1, 2, requires_grad=True)
    result = Limit.apply(layer(x)) if where == "function" else layer(x)
    torch.amp.GradScaler("cpu", init_scale=8.0).scale(result.sum()).backward()
    assert "multiplied by the loss scale" in watch.gradient_limits_text()
    assert "test_limited_gradients.py:" in watch.gradient_limits_text()


def test_limits_of_true_gradients_are_none(watch: LimitedScaledGradientsWatch) -> None:
    """Without a scale, with one of 1, in the forward pass, and of the sign alone."""
    layer, x = layer_with_limit("weight"), torch.ones(1, 2)
    layer(x).clamp(0, 3).sum().backward()
    torch.amp.GradScaler("cpu", init_scale=1.0).scale(layer(x).sum()).backward()
    torch.amp.GradScaler("cpu").scale(layer_with_limit("sign")(x).clamp(0, 3).sum()).backward()
    assert watch.gradient_limits_text() == ""
