"""A script for `torch.amp` under arms with 16-bit weights trains as ampcompare's own loop does, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ampcompare.apex.optimizers import FusedAdam
from ampcompare.precision.factory import make_precision
from tests.script.small_script import batch, network

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


CHECKS = settings(phases=[Phase.generate], deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
@settings(
    max_examples=40, phases=[Phase.generate], deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(program=PROGRAMS, arm=st.sampled_from(ARMS))
def test_a_script_trains_as_in_our_loop(behind: Any, program: Program, arm: str) -> None:
    """One optimizer, accumulated and clipped in any way, with overflows, an evaluation, a schedule and a resumption."""
    if arm not in SCALED:
        program = replace(program, overflow_at=-1)
    sides = run(behind, None, our_loop(program, arm)), run(behind, arm, script(program))
    for step, (theirs, ours) in enumerate(zip(*sides, strict=True)):
        assert all(map(has_bits, theirs[0], ours[0])), f"{arm}, weights after step {step} of {program}"
        assert theirs[1] == ours[1], f"{arm}, scale after step {step} of {program}"
