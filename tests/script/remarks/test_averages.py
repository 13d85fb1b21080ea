"""Averages of weights in 16 bits whose updates rounding loses."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, swa_utils

from ampcompare.script.recording.recorder import RecordedSteps, Recorder

Average = Callable[[nn.Module, nn.Module, float], None]


def _by_lerp(average: nn.Module, model: nn.Module, decay: float) -> None:
    for held, weight in zip(average.parameters(), model.parameters(), strict=True):
        held.data.lerp_(weight.data, 1 - decay)


def _by_sum(average: nn.Module, model: nn.Module, decay: float) -> None:
    for held, weight in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        held.mul_(decay).add_(weight, alpha=1 - decay)


def _by_copy(average: nn.Module, model: nn.Module, decay: float) -> None:
    for held, weight in zip(average.parameters(), model.parameters(), strict=True):
        held.copy_(decay * held + (1 - decay) * weight)


def _by_lists(average: nn.Module, model: nn.Module, decay: float) -> None:
    held: Any = list(average.parameters())
    swa_utils.get_ema_multi_avg_fn(decay)(held, list(model.parameters()), None)


def _by_difference(average: nn.Module, model: nn.Module, decay: float) -> None:
    for held, weight in zip(average.parameters(), model.parameters(), strict=True):
        held.sub_((1 - decay) * (held - weight))


def _by_operator(average: nn.Module, model: nn.Module, decay: float) -> None:
    for held, weight in zip(average.parameters(), model.parameters(), strict=True):
        held += (1 - decay) * (weight - held)


def _by_list_of_differences(average: nn.Module, model: nn.Module, decay: float) -> None:
    held, weights = list(average.parameters())[::-1], list(model.parameters())[::-1]
    torch._foreach_sub_(held, torch._foreach_sub(held, weights), alpha=1 - decay)


def _notes(
    behind: Any,
    arm: str,
    average: Average,
    decay: float,
    dtype: torch.dtype,
    steps: range = range(24),
    rate: float = 0.05,
    *,
    is_frozen: bool = True,
) -> list[str]:
    """Return the notes on a training with an average that begins as a copy of its weights in one of some steps."""
    torch.manual_seed(0)
    recorder = Recorder(None, {})
    recorded: list[dict[str, Any]] = []
    recorder.call_after_each_row(recorded.append)
    behind(arm, RecordedSteps(recorder))
    model = nn.Linear(32, 8).to(dtype)
    optimizer, averaged = SGD(model.parameters(), rate), None
    for step in range(steps.stop):
        result: Tensor = model(torch.randn(16, 32).to(model.weight.dtype))
        (result.float() - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in steps:
            averaged = averaged or copy.deepcopy(model).requires_grad_(not is_frozen)
            with torch.no_grad():
                average(averaged, model, decay)
    return [
        row["text"] for row in recorded if row["kind"] == "remark" and row["text"].startswith("an average")
    ]


@pytest.mark.parametrize("average", [_by_sum, _by_copy])
def test_an_average_whose_weights_ask_for_gradients_is_named(behind: Any, average: Average) -> None:
    """As a copy of the model that is written under `no_grad`, and was never frozen."""
    found = _notes(behind, "script", average, 0.999, torch.bfloat16, is_frozen=False)
    assert len(found) == 1
    assert "an average in bf16 stands still" in found[0]


@pytest.mark.parametrize(
    "average",
    [_by_lerp, _by_sum, _by_copy, _by_lists, _by_difference, _by_operator, _by_list_of_differences],
)
@pytest.mark.parametrize(("arm", "dtype"), [("script", torch.bfloat16), ("half:bf16", torch.float32)])
def test_an_average_that_stands_still_is_named(
    behind: Any, average: Average, arm: str, dtype: torch.dtype
) -> None:
    (note,) = _notes(behind, arm, average, 0.9999, dtype)
    assert note.startswith("an average in bf16 stands still: 16 steps moved ")
    assert "test_averages.py:" in note


def test_an_average_that_begins_late_is_named(behind: Any) -> None:
    """Behind the steps in which all writes are looked at."""
    (note,) = _notes(behind, "script", _by_lerp, 0.9999, torch.bfloat16, steps=range(60, 210))
    assert note.startswith("an average in bf16 stands still: 1")


@pytest.mark.parametrize(
    ("arm", "decay", "dtype"),
    [("script", 0.5, torch.bfloat16), ("script", 0.9999, torch.float32), ("half:bf16", 0.0, torch.float32)],
)
def test_an_average_that_moves_is_not(behind: Any, arm: str, decay: float, dtype: torch.dtype) -> None:
    """One that follows its weights at once, and one in fp32, are none."""
    for average in (_by_lerp, _by_sum, _by_copy, _by_difference, _by_operator):
        assert _notes(behind, arm, average, decay, dtype) == []


def test_an_average_of_weights_that_rest_is_not(behind: Any) -> None:
    """What differs from the average by nothing gives nothing to it: a frozen part, or weights at a minimum."""

    def average_itself(average: nn.Module, model: nn.Module, decay: float) -> None:
        for held in average.parameters():
            held.sub_((1 - decay) * (held - held))

    assert _notes(behind, "script", average_itself, 0.5, torch.bfloat16) == []


def test_weights_that_are_written_by_hand_are_no_average(behind: Any) -> None:
    """As by a weight decay beside the optimizer, here one that rounding loses with the steps."""

    def decay_by_hand(_: nn.Module, model: nn.Module, decay: float) -> None:
        for weight in model.parameters():
            weight.data.sub_((1 - decay) * weight.data)

    assert _notes(behind, "script", decay_by_hand, 1 - 1e-6, torch.bfloat16, rate=1e-7) == []
