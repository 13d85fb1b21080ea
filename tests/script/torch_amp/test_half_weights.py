"""A script for `torch.amp` under arms with 16-bit weights trains as ampcompare's own loop does, bit for bit."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from operator import methodcaller
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ampcompare.base.errors import PreparationError, ScalingError
from ampcompare.script.torch_amp.half_weights import _pairs_with_differing_values
from ampcompare.training.precision.base import owned_params
from tests.script.small_script import batch, network
from tests.script.trainings import (
    Gan,
    OurLoop,
    Plain,
    Program,
    TorchAmp,
    assert_equal,
    train,
    train_gan,
)

SCALED = ("apex:O2", "half:masters=fp32,bn_fp32,dynamic,init_scale=1024,growth_interval=2")
ARMS = (
    *SCALED,
    "apex:O3",
    "apex:O5",
    "apex:O2,loss_scale=128",
    "half",
    "half:bn_fp32",
    "half:bf16",
    "half:loss_scale=64",
    "half:bf16,masters=fp32,grads=float32",
)
SCALE = methodcaller("scale")


def script(behind: Any, arm: str) -> Plain:
    """Return a user's script for `torch.amp` in fp16, in a new process under an arm."""
    behind(arm)
    return ending(TorchAmp(torch.float16), behind)


def ending(side: Plain, behind: Any) -> Plain:
    side.end = behind.end  # type: ignore[method-assign]
    return side


CHECKS = settings(
    deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PROGRAMS = st.builds(
    Program,
    optimizer=st.sampled_from(["sgd", "groups", "fused"]),
    micro=st.integers(1, 3),
    clip=st.sampled_from(["", "model", "value", "hand"]),
    overflow_at=st.integers(-1, 4),
    resume_at=st.integers(-1, 4),
    evaluate=st.booleans(),
    schedule=st.booleans(),
    clear=st.sampled_from(["optimizer", "model"]),
)


@pytest.mark.integration
# a first step that is skipped
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@settings(CHECKS, max_examples=16)
@given(program=PROGRAMS, arm=st.sampled_from(ARMS))
def test_a_script_trains_as_in_our_loop(behind: Any, program: Program, arm: str) -> None:
    """One optimizer, accumulated and clipped in any way, with overflows, an evaluation, a schedule and a resumption."""
    if arm not in SCALED:
        program = replace(program, overflow_at=-1)
    theirs = train(program, lambda: ending(OurLoop(arm), behind), SCALE)
    assert_equal(theirs, train(program, lambda: script(behind, arm), SCALE), (arm, program))


GANS = st.builds(
    Gan,
    losses=st.integers(1, 2),
    clip=st.booleans(),
    overflows=st.tuples(st.tuples(st.integers(-1, 3), st.sampled_from(["maker", "judge"]))),
)


@pytest.mark.integration
@settings(CHECKS, max_examples=10)
@given(program=GANS, arm=st.sampled_from(ARMS))
def test_two_networks_train_as_in_our_loop(behind: Any, program: Gan, arm: str) -> None:
    """Both are found at the first call of one; the gradients that a loss leaves in the other network are no trouble."""
    if arm not in SCALED:
        program = replace(program, overflows=())
    theirs = train_gan(program, ending(OurLoop(arm), behind), SCALE)
    assert_equal(theirs, train_gan(program, script(behind, arm), SCALE), (arm, program))


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


@pytest.mark.parametrize("arm", [*SCALED, "half:bf16,masters=fp32,grads=float32"])
def test_a_script_may_ask_for_gradients_before_they_are_unscaled(behind: Any, arm: str) -> None:
    """Of what the optimizer holds: there are some, scaled ones, where a backward pass has made them, and only there."""
    behind(arm)
    model, idle = network(), network()
    both = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, idle)]
    scaler = torch.amp.GradScaler("cpu")
    steps = [0, 0]
    for step in range(4):
        for optimizer in both:
            optimizer.zero_grad()
        for micro in range(2):
            with torch.autocast("cpu"):
                loss = model(batch(step + micro)[0]).square().mean()
                loss = loss if step % 2 else loss + idle(batch(step)[0]).square().mean()
            scaler.scale(loss).backward()
        for number, optimizer in enumerate(both):
            held = owned_params(optimizer)
            if any(param.grad is not None for param in held):
                scaler.step(optimizer)
                steps[number] += 1
        scaler.update()
    assert steps == [4, 2]


def test_a_copy_is_an_ordinary_model(behind: Any) -> None:
    """An average of weights made before the training stays fp32; the state dict under Apex is fp32."""
    behind("apex:O2")
    model, optimizer, scaler = parts()
    average = copy.deepcopy(model)
    step_of(model, optimizer, scaler)
    assert {param.dtype for param in average.parameters()} == {torch.float32}
    assert {value.dtype for value in model.state_dict().values() if value.is_floating_point()} == {
        torch.float32
    }


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
        (add_to_unscaled, "a loss is scaled between"),
        (keep_gradients, "were not cleared"),
        (step_directly, "GradScaler"),
    ],
)
def test_what_would_be_another_training_is_refused(
    behind: Any, does: Callable[..., None], error: str
) -> None:
    behind("apex:O2")
    with pytest.raises((PreparationError, ScalingError), match=rf"test_half_weights\.py:\d+: .*{error}"):
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


class Product(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x @ y


@pytest.mark.parametrize("arm", [*SCALED, "half", "O3"])
def test_weights_that_the_script_writes_are_stepped(behind: Any, arm: str) -> None:
    """Masters take what is written, such as clamped weights, and keep their low bits where nothing is."""
    behind(arm)
    model, optimizer, scaler = parts()
    step_of(model, optimizer, scaler)
    weight, stepped = model[0].weight, optimizer.param_groups[0]["params"][0]
    before = weight.detach().clone()
    weight.data.clamp_(-0.1, 0.1)
    is_bound = weight != before
    expected = torch.where(is_bound, weight.detach().to(stepped), stepped.detach())
    step_of(model, optimizer, scaler, step=False)
    expected.add_(weight.grad.to(stepped), alpha=-0.1)
    scaler.step(optimizer)
    assert is_bound.any()
    assert torch.equal(stepped, expected)
    assert torch.equal(weight, expected.to(weight))


@pytest.mark.parametrize("arm", SCALED)
def test_masters_that_the_script_writes_are_stepped(behind: Any, arm: str) -> None:
    """As by decay through the groups of the optimizer, which hold them after `amp.initialize` too."""
    behind(arm)
    model, optimizer, scaler = parts()
    step_of(model, optimizer, scaler)
    master = optimizer.param_groups[0]["params"][0]
    expected = master.data.mul_(0.9).clone()
    step_of(model, optimizer, scaler, step=False)
    expected.add_(master.grad, alpha=-0.1)
    scaler.step(optimizer)
    assert torch.equal(master, expected)


@pytest.mark.parametrize("arm", SCALED)
def test_what_a_cast_model_gets_later_is_cast(behind: Any, arm: str) -> None:
    """As a new head, whether the optimizer has all weights or the new ones, as of LoRA; in a model of its parts too."""
    behind(arm)
    model, optimizer, scaler = parts()
    step_of(model, optimizer, scaler)
    first = copy.deepcopy(model)
    for later in (model, nn.Sequential(*model)):
        later[3] = nn.Linear(later[3].in_features, 3)
        for held in (later[3].parameters(), later.parameters()):
            optimizer = torch.optim.SGD(held, lr=0.1)
            before = [param.detach().clone() for param in later.parameters()]
            step_of(later, optimizer, scaler)
            after = list(later.parameters())
            assert later[3].weight.dtype is torch.float16
            assert not torch.equal(after[-2], before[-2].to(after[-2]))
    assert not torch.equal(first[0].weight, model[0].weight)


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


def test_only_weights_of_other_values_take_those_of_masters() -> None:
    """A copy of the same value would end each graph that the script has kept, as its weights count as written."""
    weights = [torch.tensor([1.0, math.nan]).half(), torch.tensor([1.0, 2.0]).half(), torch.zeros(2).half()]
    masters = [torch.tensor([1.0 + 2.0**-20, math.nan]), torch.tensor([1.0, 2.5]), torch.tensor([0.0, -0.0])]
    found = _pairs_with_differing_values(list(zip(weights, masters, strict=True)))
    assert [one is weight for (one, _), weight in zip(found, weights[1:], strict=True)] == [True, True]
    assert _pairs_with_differing_values([]) == []
