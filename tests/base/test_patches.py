"""The one place that replaces functions of torch: order, undoing, and what subscribers may do."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.base.patches import (
    GRADIENT_READS,
    Layer,
    PatchPoints,
    Subscriptions,
    has_stand_in,
    without_subscribers,
)


class Owner:
    """A class whose method is a point."""

    def method(self, value: int) -> list[Any]:
        """Return a list, to which subscribers add."""
        return [value]


class Heir(Owner):
    """Inherits it."""


@pytest.fixture
def subscribe() -> Iterator[Callable[[Layer], Subscriptions]]:
    """Make subscriptions that end with the test."""
    made: list[Subscriptions] = []

    def make(layer: Layer) -> Subscriptions:
        made.append(Subscriptions(layer))
        return made[-1]

    yield make
    for one in made:
        one.end()


def adds(word: str) -> Callable[..., Any]:
    """Return a subscriber that adds a word after the call."""
    return lambda inner, *args: [*inner(*args), word]


def test_layers_lie_around_each_other_in_their_order(subscribe) -> None:
    """Whoever comes first; within a layer the later one is outside."""
    for layer in (Layer.WATCH, Layer.STAND_IN, Layer.GUARDS, Layer.RECORD):
        subscribe(layer).wrap(Owner, "method", adds(layer.name))
    subscribe(Layer.RECORD).wrap(Owner, "method", adds("second"))
    assert Owner().method(1) == [1, "STAND_IN", "RECORD", "second", "GUARDS", "WATCH"]


def test_nobody_subscribed_leaves_torch_alone(subscribe) -> None:
    """The function object of torch is in place before the first and after the last subscriber, in any order of ends."""
    points = [value for name, value in vars(PatchPoints).items() if name.isupper()]
    before = [vars(owner)[name] for owner, name in points]
    first, second = subscribe(Layer.RECORD), subscribe(Layer.STAND_IN)
    for owner, name in points:
        first.wrap(owner, name, lambda inner, *args, **kwargs: inner(*args, **kwargs))
        second.wrap(owner, name, lambda inner, *args, **kwargs: inner(*args, **kwargs))
    first.end()
    assert not any(vars(owner)[name] is old for (owner, name), old in zip(points, before, strict=True))
    second.end()
    assert [vars(owner)[name] for owner, name in points] == before


def test_an_inherited_function_is_inherited_again(subscribe) -> None:
    """What a class has from its parent is replaced in the class alone, and then removed."""
    events = subscribe(Layer.RECORD)
    events.wrap(Heir, "method", adds("heir"))
    assert (Heir().method(1), Owner().method(1)) == ([1, "heir"], [1])
    events.end()
    assert "method" not in vars(Heir)


def test_what_stands_in_place_is_the_innermost(subscribe) -> None:
    """`put` replaces what subscribers lie around, whether they come before or after, and alone needs no wrapper."""
    events, other = subscribe(Layer.STAND_IN), subscribe(Layer.RECORD)
    assert not has_stand_in(Owner, "method")
    events.put_innermost(Owner, "method", stands := lambda self, value: ["put", value])
    assert vars(Owner)["method"] is stands
    assert has_stand_in(Owner, "method")
    other.wrap(Owner, "method", adds("record"))
    assert Owner().method(1) == ["put", 1, "record"]
    events.end()
    assert Owner().method(1) == [1, "record"]
    assert not has_stand_in(Owner, "method")


def test_a_subscriber_may_raise_and_call_the_point_again(subscribe) -> None:
    """An error reaches the caller and leaves everything usable; a call from inside goes to all subscribers."""
    events = subscribe(Layer.STAND_IN)

    def around(inner: Any, owner: Owner, value: int) -> Any:
        if value < 0:
            raise ValueError(value)
        return [*inner(owner, value), *(owner.method(value - 1) if value else [])]

    events.wrap(Owner, "method", around)
    subscribe(Layer.WATCH).wrap(Owner, "method", adds("watch"))
    with pytest.raises(ValueError, match="-1"):
        Owner().method(-1)
    assert Owner().method(1) == [1, 0, "watch", "watch"]


def test_code_that_wraps_a_point_meanwhile_stays(subscribe, monkeypatch) -> None:
    """It calls the present subscribers, also later ones, and at last the original alone."""
    events, later = subscribe(Layer.RECORD), subscribe(Layer.STAND_IN)
    events.wrap(Owner, "method", adds("record"))
    ours = Owner.method
    monkeypatch.setattr(Owner, "method", lambda self, value: ["foreign", *ours(self, value)])
    later.wrap(Owner, "method", adds("later"))
    assert Owner().method(1) == ["foreign", 1, "later", "record"]
    events.end()
    later.end()
    assert Owner().method(1) == ["foreign", 1]


def test_a_block_without_subscribers(subscribe) -> None:
    """The original is in place inside, and the subscribers are back after it, with those that have come meanwhile."""
    original = vars(Owner)["method"]
    events, inside = subscribe(Layer.WATCH), subscribe(Layer.RECORD)
    with without_subscribers(Owner, "method"):
        assert vars(Owner)["method"] is original
    events.wrap(Owner, "method", adds("watch"))
    with without_subscribers(Owner, "method"):
        assert vars(Owner)["method"] is original
        inside.wrap(Owner, "method", adds("inside"))
    assert Owner().method(1) == [1, "inside", "watch"]


def test_compiled_code_has_no_subscribers(subscribe) -> None:
    """While torch.compile traces, and while torch.export does, a module is called as torch calls it."""
    subscribe(Layer.RECORD).wrap(*PatchPoints.FORWARD, lambda inner, *args, **kwargs: pytest.fail("traced"))
    model = nn.Sequential(nn.Linear(2, 2))
    step = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
    assert step(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_traced_code_has_no_subscribers(subscribe) -> None:
    """torch.jit.trace records what a module computes, and nothing that others compute around it."""
    around = subscribe(Layer.RECORD)
    around.wrap(
        *PatchPoints.FORWARD, lambda inner, module, x: inner(module, x.view(torch.int32).view(torch.float32))
    )
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert "view" not in str(traced.graph)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_code_has_no_subscribers(subscribe) -> None:
    """TorchScript compiles calls of functions that are replaced as those of torch."""
    subscribe(Layer.RECORD).wrap(torch, "clamp", lambda inner, *args: pytest.fail("called"))

    @torch.jit.script
    def limit(x: Tensor) -> Tensor:
        return torch.clamp(x, 0.0, 0.5)

    assert limit(torch.ones(2)).tolist() == [0.5, 0.5]


def test_readers_of_gradients(subscribe) -> None:
    """Those who want it are called before a read, not by `zero_grad`, nor in a pause; then `grad` is torch's own."""
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    seen: list[Any] = []
    first, second = SimpleNamespace(saw=seen.append), SimpleNamespace(saw=lambda one: seen.append(1))
    GRADIENT_READS.call_before_reads(first.saw, True)
    GRADIENT_READS.call_before_reads(second.saw, True)
    assert param.grad is not None
    assert seen[0] is param
    assert seen[1] == 1
    with GRADIENT_READS.pause_notices_of_reads():
        assert "grad" not in vars(torch.Tensor)
        assert param.grad is not None
    torch.optim.SGD([param], lr=0.1).zero_grad()
    GRADIENT_READS.call_before_reads(first.saw, False)
    GRADIENT_READS.call_before_reads(second.saw, False)
    assert len(seen) == 2
    assert "grad" not in vars(torch.Tensor)
