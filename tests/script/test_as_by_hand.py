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
from ampcompare.script.apex_amp import ScriptAmp
from ampcompare.training.precision.base import make_precision
from tests.script.small_script import ARMS, batch, gan_loss, network, two_networks

pytestmark = pytest.mark.integration  # many trainings, each twice


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


def optimizer_for(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return FusedAdam(model.parameters(), lr=0.01)


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
        return gan_loss(step, who, number, maker, judge, self.overflow)


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
