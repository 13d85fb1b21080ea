"""Optimizers that evaluate losses inside of their steps train as by hand, each pass scaled and unscaled."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ampcompare.base.errors import PreparationError, UnsupportedCombination
from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.script.recording.scaled_steps import record_grad_scalers
from ampcompare.training.precision.base import owned_params
from tests.covering import covering
from tests.script.behind.test_stand_in import RecordedSteps
from tests.script.small_script import batch

STEPS = 5
MASTERS = ("O2", "half:masters=fp32,dynamic")


class Base(Optimizer):
    """Has a learning rate, and counts its steps."""

    def __init__(self, params: Any, lr: float = 0.2) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @property
    def weights(self) -> list[Any]:
        return [param for group in self.param_groups for param in group["params"]]

    def keep(self) -> None:
        for param in self.weights:
            self.state[param]["old"] = param.detach().clone()

    def back(self) -> None:
        for param in self.weights:
            param.copy_(self.state[param].pop("old"))

    def descend(self, factor: float = 1.0) -> None:
        for param in self.weights:
            param.sub_(param.grad, alpha=factor * self.param_groups[0]["lr"])


class Sharp(Base):
    """SAM: climbs by the first gradient, steps by the second; keeps an average of the first ones."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        self.count += 1
        with torch.enable_grad():
            loss = closure()
        self.keep()
        norm = torch.stack([param.grad.norm() for param in self.weights]).norm()
        for param in self.weights:
            self.state[param].setdefault("mean", torch.zeros_like(param)).lerp_(
                param.grad, 0.1 + 0.01 * self.count
            )
            param.add_(param.grad / norm, alpha=0.1)
        with torch.enable_grad():
            closure()
        self.back()
        for param in self.weights:
            param.sub_(self.state[param]["mean"], alpha=0.05)
        self.descend()
        return loss


class SharpAround(Sharp):
    """The same with another optimizer inside, which has its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = SGD(self.param_groups, lr=0.2, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def descend(self, factor: float = 1.0) -> None:
        self.inner.step()


class Extragradient(Base):
    """Moves weights by `data`, where no version tells."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        self.keep()
        for param in self.weights:
            param.data = param.data - 0.2 * param.grad
        with torch.enable_grad():
            closure()
        self.back()
        self.descend()
        return loss


class Backtracking(Base):
    """A line search, whose trials have no gradients."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        slope = sum(param.grad.square().sum() for param in self.weights)
        self.keep()
        size = 16.0
        for _ in range(10):
            for param in self.weights:
                param.data.copy_(self.state[param]["old"] - size * param.grad)
            if closure(backward=False) <= loss - 0.1 * size * slope:
                break
            size /= 2
        for param in self.weights:
            del self.state[param]["old"]
        self.param_groups[0]["last"] = size
        return loss


class MovesFirst(Base):
    """Moves weights before its only pass, by what is left of the last one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.weights:
            if "move" in self.state[param]:
                param.add_(self.state[param]["move"], alpha=0.5)
        with torch.enable_grad():
            loss = closure()
        for param in self.weights:
            self.state[param]["move"] = param.grad * -0.2
            param.add_(self.state[param]["move"])
        return loss


class Stored(Sharp):
    """Gets its closure before the step, as GSAM does."""

    closure: Any = None

    def step(self, closure: Any = None) -> Any:
        return super().step(self.closure)


KINDS = [Sharp, Extragradient, Backtracking, MovesFirst, Stored]


class Overflow(Exception):
    """Ends a step by hand."""


class Script:
    """A script that knows no mixed precision."""

    scale = 1.0

    def prepare(self, model: nn.Module) -> list[Tensor]:
        self.model = model
        return list(model.parameters())

    def call(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def unscale(self) -> None:
        """Do nothing."""

    def step(self, optimizer: Any, closure: Any) -> Any:
        return optimizer.step() if isinstance(optimizer, Stored) else optimizer.step(closure)


class ByHand(Script):
    """Autocast in fp16 with a loss scale, or a model in fp16 with master weights; a step that overflows is undone."""

    def __init__(self, *, masters: bool) -> None:
        self.masters = masters
        self.scale = 65536.0

    def prepare(self, model: nn.Module) -> list[Tensor]:
        held = super().prepare(model)
        if self.masters:
            model.half()
            held = [param.detach().float().requires_grad_() for param in held]
        self.held = held
        return held

    def call(self, x: Tensor) -> Tensor:
        if not self.masters:
            with torch.autocast("cpu", dtype=torch.float16):
                out: Tensor = self.model(x)
            return out.float()
        self.follow()
        return self.model(x.half()).float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def follow(self) -> None:
        for param, master in zip(self.model.parameters(), self.held, strict=True):
            param.copy_(master)

    def backward(self, loss: Tensor) -> None:
        (loss.float() * self.scale).backward()

    def unscale(self) -> None:
        for param, master in zip(self.model.parameters(), self.held, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float() / self.scale
            if self.masters:
                param.grad = None
        if not all(one.grad.isfinite().all() for one in self.held):  # type: ignore[union-attr]
            raise Overflow

    def step(self, optimizer: Any, closure: Any) -> Any:
        inner = [optimizer, *([optimizer.inner] if hasattr(optimizer, "inner") else [])]
        weights = [param.detach().clone() for param in self.held]
        before = [(copy.deepcopy(one.state_dict()), getattr(one, "count", 0)) for one in inner]
        try:
            super().step(optimizer, closure)
        except Overflow:
            self.scale /= 2
            for one, (state, count) in zip(inner, before, strict=True):
                one.load_state_dict(state)
                one.count = count
            with torch.no_grad():
                for param, old in zip(self.held, weights, strict=True):
                    param.copy_(old)


def train(
    make: Callable[[Any], Any], side: Script, overflow: tuple[int, int], *, factor: float = 1.0
) -> list[Tensor]:
    """Train by a closure of two micro-batches; the loss is infinite in one pass of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = make(side.prepare(model))
    for step in range(STEPS):
        passes = 0

        def closure(backward: bool = True, step: int = step) -> Tensor:
            nonlocal passes
            if backward:
                optimizer.zero_grad()
            total = torch.zeros(())
            for micro in range(2):
                x, y = batch(step, micro)
                loss = nn.functional.cross_entropy(side.call(x), y) * (factor / 2)
                if backward:
                    side.backward(loss * float("inf") if (step, passes) == overflow else loss)
                total += loss.detach()
            if backward:
                passes += 1
                side.unscale()
            return total

        optimizer.closure = closure
        side.step(optimizer, closure)
    return [param.detach().float().clone() for param in optimizer.param_groups[0]["params"]]


@contextlib.contextmanager
def under(behind: Any, arm: str, rows: Any = None) -> Iterator[None]:
    behind(arm, rows)
    try:
        yield
    finally:
        behind.end()


OVERFLOWS = [(-1, 0), (0, 0), (2, 0), (0, 1), (2, 1)]


@covering({"arm": ["native:fp16", *MASTERS], "kind": KINDS, "overflow": OVERFLOWS})
def test_steps_with_several_passes_train_as_by_hand(
    behind: Any, arm: str, kind: Any, overflow: tuple[int, int]
) -> None:
    """An overflow in the first or second pass undoes the step: weights, state, groups and counters."""
    expected = train(kind, ByHand(masters=arm in MASTERS), overflow)
    with under(behind, arm):
        ours = train(kind, Script(), overflow)
    assert all(map(torch.equal, ours, expected))
    assert not torch.equal(ours[0], train(kind, ByHand(masters=arm in MASTERS), (1, 0))[0])


@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_an_optimizer_inside_of_another_trains_as_by_hand(behind: Any, overflow: tuple[int, int]) -> None:
    test_steps_with_several_passes_train_as_by_hand(behind, "native:fp16", SharpAround, overflow)


# a line search may end elsewhere
@pytest.mark.parametrize("kind", [Sharp, Extragradient, MovesFirst, Stored])
@pytest.mark.parametrize("arm", ["O1", "native:bf16", "O3", "O5", "fp32", "half:bf16,masters=fp32"])
def test_steps_with_several_passes_train_near_fp32(behind: Any, arm: str, kind: Any) -> None:
    with under(behind, arm):
        ours = train(kind, Script(), (-1, 0))
    for one, expected in zip(ours, train(kind, Script(), (-1, 0)), strict=True):
        torch.testing.assert_close(one, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2"])
def test_small_losses_of_every_pass_are_scaled(behind: Any, arm: str) -> None:
    """At 1e-6 of its size no unscaled gradient is a number of fp16."""
    with under(behind, arm):
        ours = train(lambda held: Sharp(held, lr=2e5), Script(), (-1, 0), factor=1e-6)
    expected = train(lambda held: Sharp(held, lr=2e5), Script(), (-1, 0), factor=1e-6)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=4e-3)


@pytest.mark.parametrize("arm", ["script", "fp32", "native:fp16", "O1", "O2"])
def test_the_first_pass_of_a_step_is_recorded(behind: Any, arm: str) -> None:
    rows = RecordedSteps()
    events = Subscriptions(Layer.RECORD)
    record_grad_scalers(rows, events)
    with under(behind, arm, rows):
        train(Sharp, Script(), (2, 1) if arm in ("native:fp16", "O1", "O2") else (-1, 0))
    events.end()
    steps = [row["applied"] for row in rows.rows if row["kind"] == "step"]
    assert len(rows.losses) == 2 * STEPS  # of the micro-batches of the first pass
    assert steps == [True, True, arm in ("script", "fp32"), True, True]


@pytest.mark.parametrize("arm", ["O1", "native:bf16", "O3", "fp32"])
def test_an_optimizer_inside_of_another_trains_near_fp32(behind: Any, arm: str) -> None:
    test_steps_with_several_passes_train_near_fp32(behind, arm, SharpAround)


@pytest.mark.parametrize(
    ("arm", "why"),
    [
        *((arm, "its own master weights") for arm in (*MASTERS, "O5", "half:bf16,masters=fp32")),
        *((f"half:bf16,{option}", "fp32 copies of its own") for option in ("kahan", "rounding=stochastic")),
        ("half:loss_scale=128", "unscales the gradients of each"),
    ],
)
def test_two_optimizers_of_the_same_weights_are_refused(behind: Any, arm: str, why: str) -> None:
    with under(behind, arm):
        model = nn.Linear(6, 3)
        optimizer = SharpAround(model.parameters())
        with pytest.raises(PreparationError, match=f"two optimizers hold the same weights, .* {why}"):
            model(batch(0)[0])
        del optimizer


class Signs(Base):
    """Steps by the sign of a mean, which it writes in one of several ways."""

    def __init__(self, params: Any, write: str) -> None:
        super().__init__(params, lr=0.002)
        self.write = write

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.weights:
            mean = self.state[param].setdefault("mean", torch.zeros_like(param))
            new = param - self.param_groups[0]["lr"] * (0.9 * mean + 0.1 * param.grad).sign()
            mean.lerp_(param.grad, 0.01)
            if self.write == "data":
                param.data = new
            elif self.write == "set":
                param.set_(new)
            elif self.write == "numpy":
                param.detach().numpy()[...] = new.numpy()
            else:
                param.data.copy_(new)


COPIES = (
    "half:bf16,kahan",
    "half:bf16,rounding=stochastic",
    "half:bf16,state=fp32",
    "native:bf16,weights=bf16,kahan",
)


@pytest.mark.parametrize("write", ["data", "set", "numpy", "copy"])
@pytest.mark.parametrize("arm", [*(arm for arm in COPIES if "state" not in arm), "half:kahan,loss_scale=128"])
def test_steps_that_write_weights_themselves_train_on_copies(behind: Any, arm: str, write: str) -> None:
    """Updates of 0.002 that bf16 weights alone lose reach the model by what the arm keeps of them."""

    def trained(steps: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0).add_(torch.rand_like(param))
        optimizer = Signs(model.parameters(), write)
        for step in range(steps):
            nn.functional.cross_entropy(model(batch(step)[0]).float(), batch(step)[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([param.detach().float().flatten() for param in model.parameters()])

    with under(behind, arm):
        ours = trained(12)
    moved = trained(12) - trained(0)
    assert 0.7 < float((ours - trained(0)) @ moved / moved.square().sum()) < 1.3  # 0 where updates are lost


class Called(Signs):
    """Calls its closure first, or in one of the ways that need it in the step itself."""

    @torch.no_grad()
    def step(self, closure: Any = None, *, rate: float = 1.0) -> Any:
        loss = None
        if self.write == "moves":
            self.weights[0].data.add_(0.1)
        if self.write == "clears":
            self.zero_grad()
        if closure is not None and self.write != "leaves":
            with torch.enable_grad():
                loss = closure()
        super().step()
        for param in self.weights:
            param.mul_(rate)
        return loss


@pytest.mark.parametrize("arm", COPIES)
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("copy", ""),
        ("moves", "evaluates losses by itself"),
        ("clears", "changes gradients before it calls its closure, and"),
        ("leaves", "does not call its closure, and"),
    ],
)
def test_a_step_on_copies_gets_the_loss_of_its_closure(behind: Any, arm: str, how: str, why: str) -> None:
    """It trains as without one, with its other arguments; what needs the closure inside of the step is refused."""

    def trained(with_closure: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = Called(model.parameters(), how)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch(0)[0]).float(), batch(0)[1])
            loss.backward()
            return loss

        for _ in range(3):
            if with_closure:
                assert torch.is_tensor(optimizer.step(closure, rate=0.5))
            else:
                closure()
                optimizer.step(rate=0.5)
        return [param.detach().clone() for param in model.parameters()]

    with under(behind, arm):
        if why:
            with pytest.raises(UnsupportedCombination, match=f"the step of Called {why}"):
                trained(True)
            return
        ours = trained(True)
    with under(behind, arm):
        assert all(map(torch.equal, ours, trained(False)))


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("arm", COPIES)
def test_steps_that_evaluate_losses_are_refused_on_copies(behind: Any, arm: str, backward: bool) -> None:
    """Also by a function that the optimizer has had before, and in a trial without gradients."""

    class Stores(Base):
        function: Any = None

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.descend()
            with torch.enable_grad():
                self.function()

    with under(behind, arm):
        model = nn.Linear(6, 3)
        optimizer = Stores(model.parameters())

        def loss() -> Tensor:
            return nn.functional.cross_entropy(model(batch(0)[0]).float(), batch(0)[1])

        loss().backward()
        optimizer.function = (lambda: loss().backward()) if backward else loss
        with pytest.raises(UnsupportedCombination, match=r"the step of Stores evaluates losses by .*copies"):
            optimizer.step()


class OwnLBFGS(torch.optim.LBFGS):
    """A subclass."""


@pytest.mark.parametrize("arm", ["native:fp16", "O2"])
def test_a_subclass_of_lbfgs_is_refused_as_such(behind: Any, arm: str) -> None:
    with (
        under(behind, arm),
        pytest.raises(
            UnsupportedCombination, match=r"OwnLBFGS, a subclass of LBFGS, runs its closure several times"
        ),
    ):
        train(OwnLBFGS, Script(), (-1, 0))


class Api(Base):
    """SAM as scripts drive it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = SGD(self.param_groups, lr=0.2, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        self.keep()
        norm = torch.stack([param.grad.norm() for param in self.weights]).norm()
        for param in self.weights:
            param.add_(param.grad / norm, alpha=0.1)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        self.back()
        self.inner.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1e-6])
@pytest.mark.parametrize("arm", ["native:fp16", "O1"])
def test_sam_in_two_steps(behind: Any, arm: str, factor: float, clips: bool) -> None:
    """Both passes are scaled at every step, from the first on."""

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = Api(model.parameters())
        optimizer.param_groups[0]["lr"] = 0.2 / factor
        for step in range(STEPS):
            x, y = batch(step)
            (nn.functional.cross_entropy(model(x), y) * factor).backward()
            optimizer.first_step()
            (nn.functional.cross_entropy(model(x), y) * factor).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5 * factor)
            optimizer.second_step()
        return [param.detach().clone() for param in model.parameters()]

    with under(behind, arm):
        ours = trained()
    for one, expected in zip(ours, trained(), strict=True):
        torch.testing.assert_close(one, expected, rtol=0.02, atol=4e-3)


class Surgery(torch.optim.Adam):
    """Runs the backward passes of its losses, and steps by a sum of their gradients."""

    def step_losses(self, losses: list[Tensor]) -> None:
        params = owned_params(self)
        tasks = []
        for number, loss in enumerate(losses):
            self.zero_grad()
            loss.backward(retain_graph=number + 1 < len(losses))
            tasks.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params])
        for param, one, other in zip(params, *tasks, strict=True):
            param.grad = one - (one * other).sum() * 0.1 * other
        self.step()
        self.zero_grad()


@pytest.mark.parametrize("factor", [0.1, 1e-6])  # none of which overflows
@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2", "half:masters=fp32,dynamic"])
def test_gradients_that_are_read_by_task_have_a_scale(behind: Any, arm: str, factor: float) -> None:
    """From the first step on, in which no line has been stepped yet."""

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = Surgery(model.parameters(), lr=0.01, eps=1e-16)
        for step in range(STEPS):
            out = model(batch(step)[0]).float()  # under O1 a loss in fp16 has no gradient of 65536
            optimizer.step_losses(
                [out[:, 0].square().mean() * factor, (out[:, 1] - 1).square().mean() * factor]
            )
        return [param.detach().float().clone() for param in model.parameters()]

    with under(behind, arm):
        ours = trained()
    for one, expected in zip(ours, trained(), strict=True):
        torch.testing.assert_close(one, expected, rtol=0.02, atol=4e-3)


class OfLosses(torch.optim.SGD):
    """Gets its losses in `step`, and makes their backward passes there: the graph is kept for the second."""

    def step(self, losses: list[Tensor]) -> None:  # type: ignore[override]
        params = owned_params(self)
        total = [torch.zeros_like(param) for param in params]
        for number, loss in enumerate(losses):
            self.zero_grad()
            loss.backward(retain_graph=number + 1 < len(losses))
            for one, param in zip(total, params, strict=True):
                one += 0 if param.grad is None else param.grad
        for one, param in zip(total, params, strict=True):
            param.grad = one
        super().step()


@pytest.mark.parametrize("arm", ["native:fp16", "O2", "half:masters=fp32,dynamic", "half:bf16,masters=fp32"])
def test_a_step_may_keep_a_graph_for_its_next_pass(behind: Any, arm: str) -> None:
    """Masters that the step has not written are not given to the model in between, whose weights the graph holds."""

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = OfLosses(model.parameters(), lr=0.1)
        for step in range(STEPS):
            out = model(batch(step)[0]).float()
            optimizer.step([out[:, 0].square().mean() * 1e-2, (out[:, 1] - 1).square().mean() * 1e-2])
        return [param.detach().float().clone() for param in model.parameters()]

    with under(behind, arm):
        ours = trained()
    for one, expected in zip(ours, trained(), strict=True):
        torch.testing.assert_close(one, expected, rtol=0.02, atol=4e-3)


class TwoPoints(Base):
    """Schedule-free: gradients are those of one point, `eval` puts another into the weights."""

    is_training = True

    @torch.no_grad()
    def eval(self) -> None:
        self.is_training = False
        for param in self.weights:
            param.lerp_(self.state[param]["z"], 0.5)

    @torch.no_grad()
    def train(self) -> None:
        self.is_training = True
        for param in self.weights:
            param.lerp_(self.state[param]["z"], -1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.weights:
            z = self.state[param].setdefault("z", param.clone())
            z.sub_(param.grad, alpha=0.4)
            param.lerp_(z, 0.3)


def by_method(optimizer: Any) -> None:
    optimizer.eval()


def by_data(optimizer: Any) -> None:
    for param in owned_params(optimizer):
        param.data.mul_(0.5)


def by_other_data(optimizer: Any) -> None:
    for param in owned_params(optimizer):
        param.data = param.data * 0.5


@torch.no_grad()
def by_lists(optimizer: Any) -> None:
    torch._foreach_mul_(owned_params(optimizer), 0.5)


USES: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "parameters": lambda model: [param.detach() for param in model.parameters()],
    "state": lambda model: list(model.state_dict().values()),
}


class Traceless(Base):
    """Writes weights so that no version of a tensor tells it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.weights:
            param.detach().numpy()[...] -= 0.5 * param.grad.numpy()


@pytest.mark.parametrize("arm", MASTERS)
def test_the_first_step_of_a_class_reaches_the_model(behind: Any, arm: str) -> None:
    """It runs as one that may evaluate losses, and what it writes into masters the model has, whatever the way."""
    with under(behind, arm):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = Traceless(model.parameters())
        x, y = batch(0)
        nn.functional.cross_entropy(model(x), y).backward()
        before = model.weight.detach().clone()
        optimizer.step()
        masters = owned_params(optimizer)
        assert not torch.equal(before, model.weight)
        assert all(
            torch.equal(one, master.to(one.dtype))
            for one, master in zip(model.parameters(), masters, strict=True)
        )


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("write", [by_method, by_data, by_other_data, by_lists])
@pytest.mark.parametrize("arm", [*MASTERS, "O5", "half:bf16,masters=fp32"])
def test_what_is_written_into_masters_reaches_the_model_before_its_next_use(
    behind: Any, arm: str, write: Callable[[Any], None], use: str
) -> None:
    with under(behind, arm):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = TwoPoints(model.parameters())
        for step in range(3):
            x, y = batch(step)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = model.weight.detach().clone()
        write(optimizer)
        half = next(iter(model.parameters())).dtype
        seen = [one.to(half) for one in USES[use](model)]
        assert all(
            torch.equal(one, master.to(half))
            for one, master in zip(seen, owned_params(optimizer), strict=True)
        )
        assert not torch.equal(before, seen[0])
        x = batch(9)[0]
        out = model(x)
        master = optimizer.param_groups[0]["params"]
        expected = nn.functional.linear(x.to(half), master[0].to(half), master[1].to(half)).float()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("arm", MASTERS)
def test_lookahead_around_an_optimizer_trains_as_by_hand(behind: Any, arm: str) -> None:
    """It writes into the tensors of the groups after the step of the optimizer inside."""

    def trained(side: Script) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).half().float()  # as masters begin
        inner = SGD(side.prepare(model), lr=0.3, momentum=0.9)
        slow = [param.detach().clone() for param in owned_params(inner)]
        for step in range(6):
            x, y = batch(step)
            inner.zero_grad()
            side.backward(nn.functional.cross_entropy(side.call(x), y))
            side.unscale()
            inner.step()
            if step % 2:
                for fast, mean in zip(owned_params(inner), slow, strict=True):
                    mean += 0.5 * (fast.data - mean)
                    fast.data.copy_(mean)
        return [param.detach().clone() for param in owned_params(inner)]

    expected = trained(ByHand(masters=True))
    with under(behind, arm):
        assert all(map(torch.equal, trained(Script()), expected))


class NoRate(Base):
    """Calls its step size otherwise, takes arguments behind the closure, and a closure with arguments."""

    def __init__(self, params: Any) -> None:
        Optimizer.__init__(self, params, {"eta": 0.2})

    @torch.no_grad()
    def step(self, closure: Any = None, size: float = 1.0, *, verbose: bool = False) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure(True)
        for param in self.weights:
            param.sub_(param.grad, alpha=size * self.param_groups[0]["eta"])
        return loss


@pytest.mark.parametrize("arm", ["script", "fp32", "native:bf16", "native:fp16", "O1", "O2"])
def test_a_step_gets_the_arguments_of_the_script(behind: Any, arm: str) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = NoRate(model.parameters())

        def closure(backward: bool) -> Tensor:
            assert backward
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1])
            loss.backward()
            return loss

        assert optimizer.step(closure, 0.5, verbose=True).item() > 0
        closure(True)
        assert optimizer.step(None, 0.5) is None
        closure(True)
        optimizer.step(size=0.5)
        return [param.detach().float().clone() for param in model.parameters()]

    with under(behind, arm):
        ours = trained()
    for one, expected in zip(ours, trained(), strict=True):
        if arm in ("script", "fp32"):
            assert torch.equal(one, expected)
        torch.testing.assert_close(one, expected, rtol=0.02, atol=4e-3)


def test_a_pass_in_a_later_step_is_refused_where_earlier_ones_had_none(behind: Any) -> None:
    class Late(Base):
        closure: Any = None

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.closure is not None:
                with torch.enable_grad():
                    self.closure()
            self.descend()

    with under(behind, "native:fp16"):
        model = nn.Linear(6, 3)
        optimizer = Late(model.parameters())

        def closure() -> None:
            nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()

        closure()
        optimizer.step()
        optimizer.closure = closure
        with pytest.raises(UnsupportedCombination, match="inside of the step of an optimizer"):
            optimizer.step()
