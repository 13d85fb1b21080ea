"""The backward pass of a scaled loss starts below the product if that is unobservable, and only then."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.apex import amp
from tests.apex.amp.small_net import loss_of, start


def bits(optimizer: Any) -> list[Any]:
    return [p.grad.view(torch.int32).tolist() for p in amp.master_params(optimizer)]


Use = Callable[[Tensor, Tensor], object]


def gradients(use: Use, level: str = "O1", **options: Any) -> list[Any]:
    """Return the gradients after `use(loss, scaled_loss)` ran the backward pass."""
    model, optimizer = start(level, **options)
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled:
        use(loss, scaled)
    scaled_grads = bits(optimizer)
    amp._amp_state.close()
    return scaled_grads


def twice(loss: Tensor, scaled: Tensor) -> None:
    scaled.backward(retain_graph=True)
    scaled.backward()


def halved(loss: Tensor, scaled: Tensor) -> None:
    scaled.div_(2).backward()


def hooked(loss: Tensor, scaled: Tensor) -> None:
    scaled.register_hook(lambda grad: grad * 0.5)
    scaled.backward()


def hooked_loss(loss: Tensor, scaled: Tensor) -> None:
    loss.register_hook(lambda grad: grad * 0.5)
    scaled.backward()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("scale", ["dynamic", 128.0, 3.7])
def test_same_bits_as_through_the_product(level: str, scale: Any) -> None:
    """The short way and torch's own `backward` on the scaled loss give the same gradients, bit for bit."""
    short = gradients(lambda loss, scaled: scaled.backward(), level, loss_scale=scale)
    long = gradients(lambda loss, scaled: torch.autograd.backward(scaled), level, loss_scale=scale)
    assert short == long


@pytest.mark.parametrize(
    ("use", "same"),
    [
        (halved, lambda loss, scaled: torch.autograd.backward(scaled / 2)),
        (hooked, lambda loss, scaled: torch.autograd.backward(scaled / 2)),
        (hooked_loss, lambda loss, scaled: torch.autograd.backward(scaled / 2)),
        (twice, lambda loss, scaled: torch.autograd.backward(scaled * 2)),
        (
            lambda loss, scaled: scaled.backward(torch.tensor(0.5)),
            lambda loss, scaled: (scaled / 2).backward(),
        ),
        (lambda loss, scaled: (loss.mul_(2), scaled.backward()), lambda loss, scaled: scaled.backward()),
    ],
    ids=["in-place", "hook", "hook-on-loss", "twice", "gradient", "loss-in-place"],
)
def test_what_is_done_to_the_loss_counts(use: Use, same: Use) -> None:
    """In-place changes, hooks and arguments of `backward` have the effect that they have on any tensor."""
    assert gradients(use) == gradients(same)


def test_the_scaled_loss_is_an_ordinary_tensor() -> None:
    """It has the value, the graph and the gradient of the product, and torch's `backward` after the block."""
    model, optimizer = start()
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert type(scaled) is Tensor
        assert scaled.item() == loss.item() * 65536.0
        (grad,) = torch.autograd.grad(scaled, loss, retain_graph=True)
        assert grad.item() == 65536.0
        scaled.retain_grad()
        scaled.backward()
    assert scaled.grad.item() == 1.0
    assert "backward" not in scaled.__dict__


def test_a_replaced_backward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody put his own `torch.Tensor.backward`, as tracing tools do, it runs."""
    calls: list[int] = []
    original = Tensor.backward

    def traced(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "backward", traced)
    gradients(lambda loss, scaled: scaled.backward())
    assert calls == [1]


def test_no_cycle_is_left_behind() -> None:
    """The graph goes with the scaled loss, also after an exception, without the cyclic collector."""
    model, optimizer = start()
    gc.disable()
    try:
        for fail in (False, True):
            with pytest.raises(ZeroDivisionError) if fail else amp.disable_casts():
                with amp.scale_loss(loss_of(model), optimizer) as scaled:
                    reference = weakref.ref(scaled)
                    if fail:
                        raise ZeroDivisionError
                    scaled.backward()
            del scaled
            assert reference() is None
    finally:
        gc.enable()


def test_every_form_of_a_patched_function_works() -> None:
    """Keywords, old argument orders and mixed dtypes of the functions with wrappers of their own, casts on and off."""
    start()
    full, half = torch.full((2,), 4.0), torch.full((2,), 2.0).half()

    def forms() -> list[Tensor]:
        x = full.clone
        return [
            x().add_(half),
            x().add_(other=half),
            x().add_(half, alpha=2),
            x().mul_(half),
            x().mul_(other=half),
            x().addcmul_(half.float(), full, value=0.5),
            x().addcmul_(tensor1=full, tensor2=full),
            x().addcdiv_(full, full, value=3.0),
            full.add(half, alpha=2),
            full.add(other=half),
            full.add(1),
            full + half,
            2.0 * full,
            nn.functional.linear(full, weight=torch.eye(2)).float(),
            nn.functional.linear(full, nn.Parameter(torch.eye(2)), bias=nn.Parameter(torch.ones(2))).float(),
            nn.functional.linear(full, nn.Parameter(torch.eye(2))).float(),
        ]

    with torch.no_grad():
        cast = [entry.tolist() for entry in forms()]
        assert nn.functional.linear(full.double(), nn.Parameter(torch.eye(2))).dtype is torch.float16
        with amp.disable_casts():
            assert [entry.tolist() for entry in forms()] == cast
        with pytest.raises(TypeError):
            full.clone().mul_(full, full)  # type: ignore[call-arg]
