"""Which gradients of a step count, those that its optimizers use, and lines that run in fp32."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ampcompare.diagnosis.findings import find_first_faults_by_kind, reason_of_first_nonfinite_result
from ampcompare.diagnosis.fp32_lines import run_lines_in_fp32
from ampcompare.diagnosis.fp32_reference import Fp32Reference
from ampcompare.diagnosis.observation import RunObservation
from ampcompare.diagnosis.operation_watch import OperationWatch
from ampcompare.diagnosis.profiling.marks import PhaseFollower
from ampcompare.diagnosis.sites import HIDDEN, PACKAGE, RunningModulesTracker, nearest_user_location_text
from ampcompare.diagnosis.step_watch import StepOperationsWatch


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1, dtype=torch.float16)


@pytest.fixture
def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[StepOperationsWatch]:
    found = StepOperationsWatch(RunObservation(), steps=8)
    found.begin([model], [optimizer])
    yield found
    found.close()


def backward(watch: StepOperationsWatch, model: nn.Module, size: float) -> None:
    loss: Tensor = model(torch.ones(2, 4, dtype=torch.float16)).sum() * size
    loss.backward()
    watch.count_gradients()


def end(watch: StepOperationsWatch, optimizer: torch.optim.Optimizer) -> list[str]:
    watch.end_step(True, [optimizer])
    return [fault.kind for fault in find_first_faults_by_kind(watch.observation)]


def test_a_gradient_that_is_stepped_counts(
    watch: StepOperationsWatch, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    backward(watch, model, 6e4)
    with watch.operations.pause():
        optimizer.step()
    assert end(watch, optimizer) == ["gradient overflow"]


def test_what_another_loss_adds_behind_the_step_does_not_count(
    watch: StepOperationsWatch, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """As in a GAN, whose generator's loss goes through the discriminator that was stepped before."""
    backward(watch, model, 1.0)
    with watch.operations.pause():
        optimizer.step()
    backward(watch, model, 6e4)
    assert end(watch, optimizer) == []


def test_a_gradient_that_an_earlier_step_has_left_does_not_count(
    watch: StepOperationsWatch, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.inf)
    watch.operations.drain()
    watch.count_gradients()
    with watch.operations.pause():
        optimizer.step()
    events = watch.operations.drain().events
    assert len(events) == 2
    assert all(event.constant for event in events)


def test_a_kept_line_casts_nothing_to_16_bits() -> None:
    x = torch.full((2,), 300.0)
    called: set[str] = set()
    file, _, number = nearest_user_location_text(sys._getframe()).rpartition(":")
    with run_lines_in_fp32([f"{file}:{int(number) + 2}"], called):
        kept = x.half() * x.to(torch.float16)
        cast = x.half() * x.to(torch.float16)
    assert (kept.dtype, cast.dtype) == (torch.float32, torch.float16)
    assert torch.isfinite(kept).all()
    assert torch.isinf(cast).all()
    assert called == {"torch.Tensor.mul"}


def test_a_diagnosis_names_modules_as_the_model_does(model: nn.Module) -> None:
    """So that a pattern of `keep_fp32` finds them; a profile leaves out the wrapper of DistributedDataParallel."""
    outer = nn.ModuleDict({"module": model})
    sites, marks = RunningModulesTracker(), PhaseFollower()
    sites.name_modules(outer)
    marks.name_modules_of_new_models([outer])
    for known, name in ((sites, "module"), (marks, "")):
        known.note_module_entered(model)
        assert known.running_module == name


def test_what_is_hidden_is_there() -> None:
    """The rooms and files of the package whose lines are never shown exist under their names."""
    own = [Path(path) for path in HIDDEN if path.startswith(PACKAGE)]
    assert own
    assert all(path.exists() for path in own)


@pytest.mark.parametrize("follows", [True, False])
def test_a_table_that_is_cast_before_the_first_step_is_known_in_fp32(follows: bool) -> None:
    """What its rounding has made zero is zero in the arm alone, as of a noise schedule that begins near 1."""
    operations = OperationWatch(RunningModulesTracker(), Fp32Reference())
    schedule = torch.tensor([1 - 1e-4, 0.5])
    with operations:
        operations.is_paused, operations.follows_unseen = True, follows
        table = schedule.bfloat16()
        operations.is_paused = False
        torch.ones(2) / (1 - table)
    events = operations.drain().events
    (division,) = [at for at, event in enumerate(events) if event.key[1] == "div"]
    reason = reason_of_first_nonfinite_result(events, division)
    assert ("50 % of the results of rsub" in reason.text) if follows and reason else reason is None
    assert math.isfinite(events[division].errors[1]) == follows
