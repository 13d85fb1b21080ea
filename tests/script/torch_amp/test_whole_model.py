"""A script for `torch.amp` under arms with 16-bit weights trains as ampcompare's own loop does, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ampcompare.apex.optimizers import FusedAdam
from ampcompare.base.errors import PreparationError, ScalingError
from ampcompare.training.precision.base import make_precision
from tests.script.small_script import batch, gan_loss, network, two_networks

SCALED = ("apex:O2", "half:master_weights,bn_fp32,loss_scale=dynamic,init_scale=1024,growth_interval=2")
ARMS = (
    *SCALED,
    "apex:O3",
    "apex:O5",
    "apex:O2,loss_scale=128",
    "half",
    "half:bn_fp32",
    "half:bf16",
    "half:loss_scale=64",
    "half:bf16,master_weights,grads=float32",
)
Values = list[Tensor]


@dataclass(frozen=True)
class Program:
    """A training that both sides run.

    Attributes:
        micro: batches that are accumulated.
        clip: nothing, the "norm" or each "value" of the model's gradients, or the gradients by "hand".
        overflow_at: step whose loss is infinite.
        resume_at: step before which weights, optimizer and scale are saved and loaded into new objects.
        evaluate: run the model without gradients between the steps.
        clear: "optimizer" or "model", whose `zero_grad` is called.
    """

    optimizer: str = "sgd"
    micro: int = 1
    clip: str = ""
    overflow_at: int = -1
    resume_at: int = -1
    evaluate: bool = False
    schedule: bool = False
    clear: str = "optimizer"
    steps: int = 5


def optimizer_for(kind: str, model: nn.Module) -> Any:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "groups":
        first, *rest = model.children()
        params = [{"params": first.parameters(), "lr": 0.02}, {"params": nn.Sequential(*rest).parameters()}]
        return torch.optim.AdamW(params, lr=0.01)
    return FusedAdam(model.parameters(), lr=0.01)


def clip(how: str, params: Values) -> None:
    if how == "norm":
        clip_grad_norm_(params, 0.1)
    elif how == "value":
        clip_grad_value_(params, 0.01)
    elif how == "hand":
        for param in params:
            if param.grad is not None:
                param.grad = param.grad * 0.5


def loss_of(program: Program, model: nn.Module, step: int, micro: int) -> Tensor:
    x, y = batch(step, micro)
    loss = nn.functional.cross_entropy(model(x), y) / program.micro
    return loss * float("inf") if step == program.overflow_at and micro == 0 else loss


def scheduler_for(program: Program, optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if program.schedule else None


def script(program: Program) -> Iterator[tuple[Values, float]]:
    """Yield weights and loss scale after each step, as a user's script for `torch.amp` has them."""
    model = network()
    optimizer, scaler = optimizer_for(program.optimizer, model), torch.amp.GradScaler("cpu")
    scheduler = scheduler_for(program, optimizer)
    for step in range(program.steps):
        if step == program.resume_at:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scaler.state_dict()])
            yield [], -1.0  # the process ends here
            model = network(1)
            optimizer, scaler = optimizer_for(program.optimizer, model), torch.amp.GradScaler("cpu")
            scheduler = scheduler_for(program, optimizer)
            for one, state in zip((model, optimizer, scaler), saved, strict=True):
                one.load_state_dict(state)
        for micro in range(program.micro):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(program, model, step, micro)
            scaler.scale(loss).backward()
        if program.clip:
            scaler.unscale_(optimizer)
            clip(program.clip, list(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        (optimizer if program.clear == "optimizer" else model).zero_grad()
        if scheduler is not None:
            scheduler.step()
        if program.evaluate:
            model.eval()
            with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
                model(batch(step, 99)[0])
            model.train()
        yield [value.detach().clone() for value in model.state_dict().values()], scaler.get_scale()


def our_loop(program: Program, arm: str) -> Iterator[tuple[Values, float]]:
    """Yield the same from the calls that ampcompare's loop makes."""

    def begin(model: nn.Module, states: list[Any] | None = None) -> Any:
        precision, optimizer = make_precision(arm), optimizer_for(program.optimizer, model)
        if states is not None:
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        scheduler = scheduler_for(program, optimizer)
        (model,), (optimizer,) = precision.prepare([model], [optimizer])
        if states is not None:
            precision.load_state_dict(states[2])
        return precision, model, optimizer, scheduler

    precision, model, optimizer, scheduler = begin(network())
    for step in range(program.steps):
        if step == program.resume_at:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), precision.state_dict()])
            yield [], -1.0
            precision, model, optimizer, scheduler = begin(network(1), saved)
        for micro in range(program.micro):
            loss = loss_of(program, model, step, micro)
            precision.backward(loss, [optimizer], delay_unscale=micro < program.micro - 1)
        if program.clip:
            clip(program.clip, precision.unscale(optimizer))
        precision.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        for param in model.parameters():
            param.grad = None
        if scheduler is not None:
            scheduler.step()
        if program.evaluate:
            model.eval()
            with torch.no_grad():
                model(batch(step, 99)[0])
            model.train()
        scale = next(iter(precision.loss_scales()), 1.0)
        yield [value.detach().clone() for value in model.state_dict().values()], scale


def has_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether both have the same bits: a NaN equals a NaN."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def run(behind: Any, arm: str | None, steps: Iterator[Any]) -> list[Any]:
    """Return what a training yields; where it yields no weights, a new process begins."""
    results: list[Any] = []
    while True:
        if arm is not None:
            behind(arm)
        for one in steps:
            results.append(one)
            if not one[0]:
                break
        behind.end()
        if results[-1][0]:
            return results


CHECKS = settings(deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
PROGRAMS = st.builds(
    Program,
    optimizer=st.sampled_from(["sgd", "groups", "fused"]),
    micro=st.integers(1, 3),
    clip=st.sampled_from(["", "norm", "value", "hand"]),
    overflow_at=st.integers(-1, 4),
    resume_at=st.integers(-1, 4),
    evaluate=st.booleans(),
    schedule=st.booleans(),
    clear=st.sampled_from(["optimizer", "model"]),
)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # a first step that is skipped
@settings(CHECKS, max_examples=30)
@given(program=PROGRAMS, arm=st.sampled_from(ARMS))
def test_a_script_trains_as_in_our_loop(behind: Any, program: Program, arm: str) -> None:
    """One optimizer, accumulated and clipped in any way, with overflows, an evaluation, a schedule and a resumption."""
    if arm not in SCALED:
        program = replace(program, overflow_at=-1)
    sides = run(behind, None, our_loop(program, arm)), run(behind, arm, script(program))
    for step, (theirs, ours) in enumerate(zip(*sides, strict=True)):
        assert all(map(has_bits, theirs[0], ours[0])), f"{arm}, weights after step {step} of {program}"
        assert theirs[1] == ours[1], f"{arm}, scale after step {step} of {program}"


@dataclass(frozen=True)
class Gan:
    """A training of two networks with two optimizers, which take turns.

    Attributes:
        losses: of the judge, each with a backward pass.
        clip: gradients of both.
        overflow: step and network whose first loss is infinite.
    """

    losses: int
    clip: bool
    overflow: tuple[int, str]

    def loss(self, step: int, who: str, number: int, maker: nn.Module, judge: nn.Module) -> Tensor:
        return gan_loss(step, who, number, maker, judge, self.overflow)

    def turns(self) -> Iterator[tuple[int, str, int]]:
        """Yield step, network and number of losses of each turn."""
        for step in range(4):
            yield step, "judge", self.losses
            yield step, "maker", 1


def gan(program: Gan) -> Iterator[tuple[Values, float]]:
    """Yield the weights of both networks and the scale after each turn, as a script for `torch.amp` has them."""
    (maker, judge), (for_maker, for_judge) = two_networks()
    scaler = torch.amp.GradScaler("cpu")
    for step, who, losses in program.turns():
        net, optimizer = (maker, for_maker) if who == "maker" else (judge, for_judge)
        net.zero_grad()  # not that of the other network, which gets gradients too
        for number in range(losses):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = program.loss(step, who, number, maker, judge)
            scaler.scale(loss).backward()
        if program.clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        yield [value.clone() for one in (maker, judge) for value in one.state_dict().values()], scaler.get_scale()


def our_gan(program: Gan, arm: str) -> Iterator[tuple[Values, float]]:
    """Yield the same from the calls that ampcompare's loop makes."""
    precision = make_precision(arm)
    (maker, judge), (for_maker, for_judge) = precision.prepare(*two_networks())
    for step, who, losses in program.turns():
        optimizer = for_maker if who == "maker" else for_judge
        for number in range(losses):
            loss = program.loss(step, who, number, maker, judge)
            precision.backward(loss, [optimizer], delay_unscale=number < losses - 1)
        if program.clip:
            clip_grad_norm_(precision.unscale(optimizer), 0.1)
        precision.step(optimizer)
        for one in (for_maker, for_judge):
            one.zero_grad(set_to_none=True)
        for param in (*maker.parameters(), *judge.parameters()):
            param.grad = None
        scale = next(iter(precision.loss_scales()), 1.0)
        yield [value.clone() for one in (maker, judge) for value in one.state_dict().values()], scale


GANS = st.builds(
    Gan,
    losses=st.integers(1, 2),
    clip=st.booleans(),
    overflow=st.tuples(st.integers(-1, 3), st.sampled_from(["maker", "judge"])),
)


@pytest.mark.integration
@settings(CHECKS, max_examples=15)
@given(program=GANS, arm=st.sampled_from(ARMS))
def test_two_networks_train_as_in_our_loop(behind: Any, program: Gan, arm: str) -> None:
    """Both are found at the first call of one; the gradients that a loss leaves in the other network are no trouble."""
    if arm not in SCALED:
        program = replace(program, overflow=(-1, ""))
    sides = run(behind, None, our_gan(program, arm)), run(behind, arm, gan(program))
    for step, (theirs, ours) in enumerate(zip(*sides, strict=True)):
        assert all(map(has_bits, theirs[0], ours[0])), f"{arm}, weights after turn {step} of {program}"
        assert theirs[1] == ours[1], f"{arm}, scale after turn {step} of {program}"


def step_of(model: Callable[..., Tensor], optimizer: Any, scaler: Any, *, step: bool = True) -> None:
    """Train a step, or compute gradients and unscale them."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(batch(0)[0]).float().square().mean()
    scaler.scale(loss).backward()
    if step:
        scaler.step(optimizer)
        scaler.update()
    else:
        scaler.unscale_(optimizer)


def parts() -> tuple[nn.Module, Any, Any]:
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")


@pytest.mark.parametrize("arm", SCALED)
def test_gradients_of_the_model_are_those_of_its_masters(behind: Any, arm: str) -> None:
    """From `unscale_` until they are cleared; reading, writing and clearing them works as on any parameter."""
    behind(arm)
    model, optimizer, scaler = parts()
    step_of(model, optimizer, scaler, step=False)
    weight: Any = next(model.parameters())
    master = optimizer.param_groups[0]["params"][0]
    assert (weight.dtype, weight.grad.dtype, master.dtype) == (torch.float16, torch.float32, torch.float32)
    assert weight.grad is master.grad
    weight.grad = torch.ones_like(weight)
    assert torch.equal(master.grad, torch.ones_like(master))
    before = master.clone()
    scaler.step(optimizer)
    assert torch.equal(master, before - 0.1)
    assert torch.equal(weight.grad, torch.ones_like(master))
    model.zero_grad()
    assert weight.grad is None
    assert master.grad is None


def test_a_copy_is_an_ordinary_model(behind: Any) -> None:
    """An average of weights made before the training stays fp32; the state dict under Apex is fp32."""
    behind("apex:O2")
    model, optimizer, scaler = parts()
    average = copy.deepcopy(model)
    step_of(model, optimizer, scaler)
    assert {param.dtype for param in average.parameters()} == {torch.float32}
    assert {value.dtype for value in model.state_dict().values() if value.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("arm", ["apex:O2", "half"])
def test_a_copy_of_a_cast_model_trains(behind: Any, arm: str) -> None:
    """As in the inner loop of a meta-learner: its weights are fp32 until the arm casts them again."""
    behind(arm)
    model, optimizer, scaler = parts()
    step_of(model, optimizer, scaler)
    copied = copy.deepcopy(model)
    before = [param.detach().clone() for param in copied.parameters()]
    step_of(copied, torch.optim.SGD(copied.parameters(), lr=0.1), scaler)
    assert copied[0].weight.dtype is torch.float16
    assert not torch.equal(copied[0].weight, before[0])
    assert all(map(torch.equal, before, model.parameters())), "the model that was copied stays as it was"


def write_weights(model: Any, optimizer: Any, scaler: Any) -> None:
    step_of(model, optimizer, scaler)
    next(model.parameters()).data.clamp_(-0.01, 0.01)
    step_of(model, optimizer, scaler)


def hold_a_part(model: Any, optimizer: Any, scaler: Any) -> None:
    step_of(model, optimizer, scaler)
    whole = nn.Sequential(model, nn.Linear(3, 3))
    step_of(whole, torch.optim.SGD(whole.parameters(), lr=0.1), scaler)


def add_to_unscaled(model: Any, optimizer: Any, scaler: Any) -> None:
    step_of(model, optimizer, scaler, step=False)
    step_of(model, optimizer, scaler)


def keep_gradients(model: Any, optimizer: Any, scaler: Any) -> None:
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(batch(0)[0]).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def step_directly(model: Any, optimizer: Any, scaler: Any) -> None:
    step_of(model, optimizer, scaler, step=False)
    optimizer.step()


@pytest.mark.parametrize(
    ("does", "error"),
    [
        (hold_a_part, "outside of a part of it that apex:O2 has cast before"),
        (write_weights, "has written weights of the model since the last step"),
        (add_to_unscaled, "a loss is scaled between"),
        (keep_gradients, "were not cleared"),
        (step_directly, "GradScaler"),
    ],
)
def test_what_would_be_another_training_is_refused(behind: Any, does: Callable[..., None], error: str) -> None:
    """With the line of the script."""
    behind("apex:O2")
    with pytest.raises((PreparationError, ScalingError), match=rf"test_whole_model\.py:\d+: .*{error}"):
        does(*parts())


def test_a_part_may_be_called(behind: Any) -> None:
    """The whole model is cast, and what the script calls by itself gets inputs of its type, and gives fp32."""
    behind("apex:O2")
    model, optimizer, scaler = parts()
    seen: list[torch.dtype] = []

    def by_parts(x: Tensor) -> Tensor:
        hidden = model[0](x)
        seen.extend([hidden.dtype, model[0].weight.dtype, model[3].weight.dtype])
        out: Tensor = model[3](torch.relu(hidden))
        return out

    step_of(by_parts, optimizer, scaler)
    assert seen == [torch.float32, torch.float16, torch.float16]


def test_a_distance_gets_weights_and_outputs_of_a_model(behind: Any) -> None:
    """A module without weights widens 16-bit tensors beside fp32 ones, as does a method of a loss that has weights."""
    behind("apex:O2")
    model, optimizer, scaler = parts()
    step_of(model, optimizer, scaler)
    nearest = nn.PairwiseDistance()(model(batch(0)[0])[0], model[3].weight.mean(1))
    products = Product()(model(batch(0)[0]), model[3].weight)
    assert nearest.dtype is products.dtype is torch.float32
    assert Product()(model[3].weight, model[3].weight.T).dtype is torch.float16


def test_an_average_moves_towards_cast_weights(behind: Any) -> None:
    """By `lerp` too, which refuses tensors of unlike types, with the figures of their sum."""
    behind("apex:O2")
    model, optimizer, scaler = parts()
    average = copy.deepcopy(model)
    step_of(model, optimizer, scaler)
    for kept, param in zip(average.parameters(), model.parameters(), strict=True):
        expected = kept + 0.25 * (param.float() - kept)
        assert torch.equal(kept.data.lerp(param.data, 0.25), expected)
        torch._foreach_lerp_([kept.data], [param.data], 0.25)
        assert torch.equal(kept, expected)
        kept.data.lerp_(param.data, 0.5)
    assert {param.dtype for param in average.parameters()} == {torch.float32}


class Product(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x @ y


@pytest.mark.parametrize("arm", ["half", "O3"])
def test_weights_without_masters_may_be_written(behind: Any, arm: str) -> None:
    """Nothing overwrites them."""
    behind(arm)
    write_weights(*parts())


@pytest.mark.parametrize("arm", ["half:bf16", "O3"])
def test_a_script_without_a_scaler_trains_where_none_is_needed(behind: Any, arm: str) -> None:
    """A script in bf16 has none."""
    behind(arm)
    model, optimizer, _ = parts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch(0)[0]).square().mean()
    loss.backward()
    optimizer.step()
    assert next(model.parameters()).dtype is not torch.float32


def test_a_model_without_the_optimizers_weights_stays(behind: Any) -> None:
    """A frozen teacher is called first, and computes in fp32."""
    behind("O2")
    model, optimizer, scaler = parts()
    teacher = network(1)
    with torch.no_grad():
        assert teacher(batch(0)[0]).dtype is torch.float32
    step_of(model, optimizer, scaler)
    assert next(teacher.parameters()).dtype is torch.float32
    assert next(model.parameters()).dtype is torch.float16


@pytest.mark.parametrize("arm", ["O2", "O3", "half"])
def test_what_is_made_later_trains_too(behind: Any, arm: str) -> None:
    """Another model is cast as the first was, with the same steps; and another optimizer steps a model that is cast."""
    behind(arm)
    first, second = parts(), parts()
    for model, optimizer, scaler in (first, second):
        for _ in range(2):
            step_of(model, optimizer, scaler)
    assert all(map(torch.equal, first[0].parameters(), second[0].parameters()))
    model, _, scaler = second
    before = [param.detach().clone() for param in model.parameters()]
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    late.zero_grad()
    step_of(model, late, scaler)
    assert next(model.parameters()).dtype is torch.float16
    assert not torch.equal(before[-1], list(model.parameters())[-1])
