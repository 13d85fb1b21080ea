"""An Apex script under other arms trains as the same script written by hand for them, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from ampcompare.apex.optimizers import FusedAdam
from ampcompare.errors import PreparationError, ScalingError
from ampcompare.precision.factory import make_precision
from ampcompare.script.amp import ScriptAmp

ARMS = {
    "fp32": "fp32",
    "fp16": "native:fp16,init_scale=1024,growth_interval=3",
    "odd": "native:fp16,init_scale=1000,growth_interval=2",
    "bf16": "native:bf16",
}


@dataclass(frozen=True)
class Program:
    """A training that both sides run.

    Attributes:
        losses: into one optimizer, each with a backward pass of its own.
        micro: batches that are accumulated.
        delay: `delay_unscale` on all but the last block of a step.
        clip: nothing, "master" parameters, those of the "model", or those of the model by "hand".
        overflow_at: step whose loss is infinite.
        resume_at: step before which all is saved and loaded into new objects.
        evaluate: run the model without gradients between the steps.
    """

    optimizer: str = "sgd"
    losses: int = 1
    micro: int = 1
    delay: bool = False
    clip: str = ""
    overflow_at: int = -1
    resume_at: int = -1
    evaluate: bool = False
    schedule: bool = False
    steps: int = 5


class Side:
    """How one side does what differs between Apex and `torch.amp`."""

    def __init__(self, arm: str) -> None:
        self.arm = arm

    def prepare(self, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def forward(self) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def backward(self, loss: Tensor, optimizer: Any, *, delay: bool) -> None:
        raise NotImplementedError

    def clip(self, how: str, model: nn.Module, optimizer: Any) -> None:
        raise NotImplementedError

    def step(self, optimizer: Any) -> None:
        raise NotImplementedError

    def state(self) -> Any:
        raise NotImplementedError

    def load(self, state: Any) -> None:
        raise NotImplementedError


class Apex(Side):
    """A script for Apex, whose `amp` is the arm's."""

    def __init__(self, arm: str) -> None:
        super().__init__(arm)
        self.amp = ScriptAmp(arm, lambda device: make_precision(arm, device=device))

    def prepare(self, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        return self.amp.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def forward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor, optimizer: Any, *, delay: bool) -> None:
        with self.amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled:
            scaled.backward()

    def clip(self, how: str, model: nn.Module, optimizer: Any) -> None:
        if how == "hand":
            halve([param.grad for param in model.parameters()])
        elif how:
            clip_grad_norm_(self.amp.master_params(optimizer) if how == "master" else model.parameters(), 0.1)

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def state(self) -> Any:
        return self.amp.state_dict()

    def load(self, state: Any) -> None:
        self.amp.load_state_dict(state)


class ByHand(Side):
    """The same with `torch.autocast` and `GradScaler`, or without either."""

    def __init__(self, arm: str) -> None:
        super().__init__(arm)
        self.scaler: Any = None
        if "fp16" in arm:
            options = dict(word.split("=") for word in arm.split(",")[1:])
            self.scaler = torch.amp.GradScaler(
                "cpu", init_scale=float(options["init_scale"]), growth_interval=int(options["growth_interval"])
            )

    def prepare(self, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        return model, optimizer

    def forward(self) -> AbstractContextManager[Any]:
        if self.arm == "fp32":
            return nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16 if "bf16" in self.arm else torch.float16)

    def backward(self, loss: Tensor, optimizer: Any, *, delay: bool) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip(self, how: str, model: nn.Module, optimizer: Any) -> None:
        if how and self.scaler is not None:
            self.scaler.unscale_(optimizer)
        if how == "hand":
            halve([param.grad for param in model.parameters()])
        elif how:
            clip_grad_norm_(model.parameters(), 0.1)

    def step(self, optimizer: Any) -> None:
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def state(self) -> Any:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load(self, state: Any) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(state)


def halve(grads: list[Any]) -> None:
    for grad in grads:
        if grad is not None:
            grad.mul_(0.5)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def optimizer_for(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return FusedAdam(model.parameters(), lr=0.01)


def batch(*key: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def train(program: Program, make_side: Callable[[], Side]) -> Iterator[tuple[list[Tensor], Any]]:
    """Yield the weights and the amp state after each step."""
    side, model = make_side(), network()
    model, optimizer = side.prepare(model, optimizer_for(program.optimizer, model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if program.schedule else None
    for step in range(program.steps):
        if step == program.resume_at:
            saved = [model.state_dict(), optimizer.state_dict(), side.state()]
            if isinstance(side, Apex):
                side.amp.end()
            side, model = make_side(), network(1)
            model, optimizer = side.prepare(model, optimizer_for(program.optimizer, model))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            side.load(saved[2])
            if program.schedule:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        blocks = list(itertools.product(range(program.micro), range(program.losses)))
        for number, (micro, index) in enumerate(blocks):
            x, y = batch(step, micro)
            with side.forward():
                loss = nn.functional.cross_entropy(model(x).roll(index, 1), y) / program.micro
            if step == program.overflow_at and number == 0:
                loss = loss * float("inf")
            side.backward(loss, optimizer, delay=program.delay and number < len(blocks) - 1)
        side.clip(program.clip, model, optimizer)
        side.step(optimizer)
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if program.evaluate:
            model.eval()
            with side.forward(), torch.no_grad():
                model(batch(step, 99)[0])
            model.train()
        yield [value.detach().clone() for value in model.state_dict().values()], dict(side.state())
    if isinstance(side, Apex):
        side.amp.end()


def assert_equal(program: Program, arm: str) -> None:
    # To the end, one after the other: the casts of the first must not act on the second.
    sides = [list(train(program, lambda kind=kind: kind(ARMS[arm]))) for kind in (Apex, ByHand)]
    for step, (ours, theirs) in enumerate(zip(*sides, strict=True)):
        assert all(map(torch.equal, ours[0], theirs[0])), f"{arm}, weights after step {step} of {program}"
        assert ours[1] == theirs[1], f"{arm}, state after step {step} of {program}"


PROGRAMS = st.builds(
    Program,
    optimizer=st.sampled_from(["sgd", "adam", "fused"]),
    losses=st.integers(1, 2),
    micro=st.integers(1, 3),
    delay=st.booleans(),
    clip=st.sampled_from(["", "master", "model", "hand"]),
    overflow_at=st.integers(-1, 4),
    resume_at=st.integers(-1, 4),
    evaluate=st.booleans(),
    schedule=st.booleans(),
)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # a first step that is skipped
@settings(max_examples=60, deadline=None)
@given(PROGRAMS, st.sampled_from(sorted(ARMS)))
def test_a_script_for_apex_trains_as_written_by_hand(program: Program, arm: str) -> None:
    """One optimizer, accumulated and clipped in any way, with overflows, an evaluation, a schedule and a resumption."""
    if arm != "fp16" and arm != "odd":
        program = replace(program, overflow_at=-1)
    assert_equal(program, arm)


@dataclass(frozen=True)
class Gan:
    """A training of two networks with two optimizers that both sides run.

    Attributes:
        together: for each step whether both optimizers step after all losses; else they take turns.
        losses: of the judge, each with a backward pass.
        micro: backward passes of the maker.
        clip: gradients of both.
        overflow: step and network whose first loss is infinite.
    """

    together: tuple[bool, ...]
    losses: int
    micro: int
    clip: bool
    overflow: tuple[int, str]

    def loss(self, step: int, who: str, number: int, maker: nn.Module, judge: nn.Module) -> Tensor:
        x, _ = batch(step, number)
        if who == "maker":
            loss = judge(maker(x)).float().square().mean()
        else:
            loss = (judge(maker(x).detach()).float() - number).square().mean()
        return loss * (float("inf") if self.overflow == (step, who) and number == 0 else 1)


def gan(program: Gan) -> Iterator[tuple[list[Tensor], Any]]:
    """Yield the weights of both networks, and the amp state, as a script for Apex has them."""
    amp = ScriptAmp(ARMS["fp16"], lambda device: make_precision(ARMS["fp16"], device=device))
    nets, optimizers = two_networks()
    (maker, judge), (for_maker, for_judge) = amp.initialize(nets, optimizers, num_losses=3)

    def backward(step: int, who: str, number: int) -> None:
        loss = program.loss(step, who, number, maker, judge)
        with amp.scale_loss(loss, for_maker if who == "maker" else for_judge, loss_id=number) as scaled:
            scaled.backward()

    def update(optimizer: Any) -> None:
        if program.clip:
            clip_grad_norm_(amp.master_params(optimizer), 0.1)
        optimizer.step()

    for step, together in enumerate(program.together):
        for_judge.zero_grad()
        for number in range(program.losses):
            backward(step, "judge", number)
        if not together:
            update(for_judge)
        for_maker.zero_grad()
        for number in range(program.micro):
            backward(step, "maker", number)
        if together:
            update(for_judge)
        update(for_maker)
        yield [value.clone() for net in (maker, judge) for value in net.state_dict().values()], amp.state_dict()
    amp.end()


def gan_by_hand(program: Gan) -> Iterator[tuple[list[Tensor], Any]]:
    """Yield the same of a script for `torch.amp`."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=3)
    (maker, judge), (for_maker, for_judge) = two_networks()

    def backward(step: int, who: str, number: int) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = program.loss(step, who, number, maker, judge)
        scaler.scale(loss).backward()

    def update(net: nn.Module, optimizer: Any) -> None:
        if program.clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)

    for step, together in enumerate(program.together):
        for_judge.zero_grad()
        for number in range(program.losses):
            backward(step, "judge", number)
        if not together:
            update(judge, for_judge)
            scaler.update()
        for_maker.zero_grad()
        for number in range(program.micro):
            backward(step, "maker", number)
        if together:  # one scale, which may only move when both are stepped
            update(judge, for_judge)
        update(maker, for_maker)
        scaler.update()
        yield [value.clone() for net in (maker, judge) for value in net.state_dict().values()], scaler.state_dict()


def two_networks() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    nets: list[nn.Module] = [nn.Linear(6, 6), nn.Linear(6, 1)]
    return nets, [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]


GANS = st.builds(
    Gan,
    together=st.tuples(*[st.booleans()] * 4),
    losses=st.integers(1, 2),
    micro=st.integers(1, 2),
    clip=st.booleans(),
    overflow=st.tuples(st.integers(-1, 3), st.sampled_from(["maker", "judge"])),
)


@settings(max_examples=20, deadline=None)
@given(GANS)
def test_two_optimizers_share_a_scale(program: Gan) -> None:
    """A GAN trains as by hand with one GradScaler, whether its optimizers take turns or one waits for the other."""
    for step, (ours, theirs) in enumerate(zip(list(gan(program)), gan_by_hand(program), strict=True)):
        assert all(map(torch.equal, ours[0], theirs[0])), f"weights after step {step} of {program}"
        assert ours[1] == theirs[1], f"state after step {step} of {program}"


@pytest.mark.parametrize(
    "arm", ["half:bn_fp32", "half:master_weights,loss_scale=dynamic,init_scale=1024", "half:loss_scale=64"]
)
@pytest.mark.parametrize("micro", [1, 2])
def test_a_half_arm_trains_as_in_our_loop(arm: str, micro: int) -> None:
    """A script's calls do to a model what the loop's do."""
    program = Program(micro=micro, clip="master", evaluate=True)
    model = network()
    precision = make_precision(arm)
    (model,), (optimizer,) = precision.prepare([model], [optimizer_for("sgd", model)])
    for step, (weights, state) in enumerate(list(train(program, lambda: Apex(arm)))):
        for number in range(micro):
            x, y = batch(step, number)
            loss = nn.functional.cross_entropy(model(x), y) / micro
            precision.backward(loss, [optimizer], delay_unscale=number < micro - 1)
        clip_grad_norm_(precision.unscale(optimizer), 0.1)
        precision.step(optimizer)
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(batch(step, 99)[0])
        model.train()
        assert all(map(torch.equal, weights, model.state_dict().values())), step
        assert state == precision.state_dict()


Make = Callable[[str], ScriptAmp]


def loss_of(model: nn.Module) -> Tensor:
    return model(batch(0)[0]).float().square().mean()


def initialized(amp: ScriptAmp, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    model = network()
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), *args, **kwargs)


def backward(amp: ScriptAmp, model: Any, optimizer: Any) -> None:
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()


def test_casts_are_on_where_those_of_o1_would_be(script_amp: Make) -> None:
    """They are on from `initialize` on, but not in `scale_loss`, `disable_casts` and `step`."""
    amp = script_amp("bf16")
    assert network()(batch(0)[0]).dtype is torch.float32
    model, optimizer = initialized(amp)
    x = batch(0)[0]
    assert model(x).dtype is torch.bfloat16
    with amp.disable_casts():
        assert model(x).dtype is torch.float32
    with torch.autocast("cpu", enabled=False), amp.scale_loss(model(x).sum(), optimizer) as scaled:
        assert model(x).dtype is torch.float32
        scaled.backward()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    optimizer.step()
    assert seen == [False]
    assert model(x).dtype is torch.bfloat16


def test_functions_are_cast_as_registered(script_amp: Make) -> None:
    """`half_function` and its kin cast while casts are on, and only under an arm that casts functions."""

    class Library:
        same = staticmethod(lambda *tensors: tuple(tensor.dtype for tensor in tensors))

    wide, narrow = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    amp = script_amp("bf16")
    functions = amp.functions()
    half, promote = functions["half_function"](Library.same), functions["promote_function"](Library.same)
    functions["register_float_function"](Library, "same")
    assert half(wide) == (torch.float32,)
    initialized(amp)
    assert half(wide) == (torch.bfloat16,)
    assert promote(wide, narrow) == (torch.float32, torch.float32)
    assert promote(narrow, narrow) == (torch.bfloat16, torch.bfloat16)
    assert Library.same(narrow) == (torch.float32,)
    with pytest.raises(ValueError, match="No function named absent"):
        functions["register_half_function"](Library, "absent")
    amp.end()
    other = script_amp("fp32")
    initialized(other)
    assert other.functions()["half_function"](Library.same)(wide) == (torch.float32,)


def test_a_second_initialize_has_its_own_precision(script_amp: Make) -> None:
    """Models of a later call train by a loss scale of their own."""
    amp = script_amp(ARMS["fp16"])
    first, second = initialized(amp), initialized(amp)
    for pair in (first, second, first):
        backward(amp, *pair)
        pair[1].step()
    assert [precision.state_dict()["_growth_tracker"] for precision in amp.precisions] == [2, 1]
    with pytest.raises(ScalingError, match="those of two calls"):
        amp.scale_loss(loss_of(first[0]), [first[1], second[1]])
    with pytest.raises(ScalingError, match="after several calls"):
        amp.state_dict()


def test_gradients_that_were_cleared_end_their_step(script_amp: Make) -> None:
    """A script that drops gradients it does not like goes on with the next batch."""
    amp = script_amp(ARMS["fp16"])
    model, optimizer = initialized(amp)
    before = [param.clone() for param in model.parameters()]
    backward(amp, model, optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    backward(amp, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    assert amp.state_dict()["_growth_tracker"] == 2


@pytest.mark.parametrize("arm", ["native:fp16", "half:master_weights,loss_scale=dynamic"])
def test_what_has_no_translation_is_refused_at_its_line(script_amp: Make, arm: str) -> None:
    """Each refusal names file and line of the script, and the reason."""
    amp = script_amp(arm)
    with pytest.raises(ScalingError, match="before amp"):
        amp.state_dict()
    with pytest.raises(PreparationError, match=r"test_amp\.py:\d+: amp.initialize has enabled=False"):
        initialized(amp, enabled=False)
    with pytest.raises(PreparationError, match=r"test_amp\.py:\d+: amp.init has no models"):
        amp.init()
    model, optimizer = initialized(amp)
    with pytest.raises(ScalingError, match=r"test_amp\.py:\d+: optimizer.step gets a closure"):
        optimizer.step(lambda: loss_of(model))
    backward(amp, model, optimizer)
    clip_grad_norm_(amp.master_params(optimizer), 1.0)
    with pytest.raises(ScalingError, match=r"test_amp\.py:\d+: this scale_loss block adds to gradients that were read"):
        backward(amp, model, optimizer)
    optimizer.step()
    with pytest.raises(ScalingError, match="has prepared"):
        amp.scale_loss(loss_of(model), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ScalingError, match="the checkpoint is another arm's"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}})


def test_a_scale_that_one_optimizer_holds_back_is_refused(script_amp: Make) -> None:
    """One optimizer cannot step twice on a scale that waits for another one."""
    amp = script_amp("native:fp16")
    nets, optimizers = two_networks()
    amp.initialize(nets, optimizers)
    x = batch(0)[0]
    with amp.scale_loss(nets[1](nets[0](x)).float().mean(), optimizers) as scaled:
        scaled.backward()
    optimizers[0].step()
    with amp.scale_loss(nets[0](x).float().mean(), optimizers[0]) as scaled:
        scaled.backward()
    with pytest.raises(ScalingError, match="while another one still holds gradients"):
        optimizers[0].step()
    optimizers[1].zero_grad()


def test_a_step_without_a_block_is_the_optimizers_own(script_amp: Make) -> None:
    """Before the first batch, or after a plain backward pass, nothing is scaled."""
    amp = script_amp("native:fp16")
    model, optimizer = initialized(amp)
    optimizer.step()
    loss_of(model).backward()
    before = [(param.clone(), param.grad.clone()) for param in model.parameters()]
    optimizer.step()
    for param, (weight, grad) in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param, weight - 0.1 * grad)


def test_a_disabled_script_and_a_closure_are_fp32(script_amp: Make) -> None:
    """Under fp32 nothing is refused that plain training can do."""
    amp = script_amp("fp32")
    model, optimizer = initialized(amp, enabled=False)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    assert optimizer.step(closure).item() > 0


def test_a_plain_backward_pass_adds_true_gradients(script_amp: Callable[[str], ScriptAmp]) -> None:
    """After a block it adds to gradients that are unscaled by then, as under Apex; alone it is a step in fp32 range."""
    amp, model = script_amp(ARMS["fp16"]), nn.Linear(6, 3, bias=False)
    expected = model.weight.detach().clone()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.ones(1, 6)
    with amp.scale_loss(model(x).float().sum(), optimizer) as scaled:
        scaled.backward()
    other = 2 * model.weight.sum()
    amp.before_backward([other])
    other.backward()
    optimizer.step()
    assert torch.equal(model.weight, expected - 3)
    optimizer.zero_grad()
    plain = 2 * model.weight.sum()
    amp.before_backward([plain])
    plain.backward()
    optimizer.step()
    assert torch.equal(model.weight, expected - 3 - 2)


def test_a_plain_backward_pass_of_another_model_changes_nothing(script_amp: Callable[[str], ScriptAmp]) -> None:
    """Accumulation continues: what it does not reach stays scaled."""
    amp, model, other = script_amp(ARMS["fp16"]), nn.Linear(6, 3, bias=False), nn.Linear(6, 3)
    before = model.weight.detach().clone()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(1, 6)).float().sum(), optimizer) as scaled:
            scaled.backward()
        amp.before_backward([other(torch.ones(1, 6)).sum()])
    optimizer.step()
    assert torch.equal(model.weight, before - 2)


@pytest.mark.parametrize("case", ["plain first", "delayed", "masters"])
def test_true_gradients_that_meet_scaled_ones_are_refused(script_amp: Callable[[str], ScriptAmp], case: str) -> None:
    """They could not be told apart; the message names the line."""
    arm = "half:master_weights,loss_scale=64" if case == "masters" else ARMS["fp16"]
    amp, model = script_amp(arm), nn.Linear(6, 3)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def plain() -> None:
        loss = model(torch.ones(1, 6)).float().sum()
        amp.before_backward([loss])
        loss.backward()

    def block() -> None:
        loss = model(torch.ones(1, 6)).float().sum()
        with amp.scale_loss(loss, optimizer, delay_unscale=case == "delayed") as scaled:
            scaled.backward()

    first, second = (plain, block) if case == "plain first" else (block, plain)
    first()
    with pytest.raises(ScalingError, match=r"test_amp\.py:\d+: .*loss\.backward\(\)"):
        second()
