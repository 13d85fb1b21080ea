"""An optimizer whose first steps get no gradient is named, under every arm; healthy trainings have no remark."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, SparseAdam

from ampcompare.script.recording.recorder import RecordedSteps, Recorder

ARMS = ("script", "fp32", "native:fp16", "apex:O1", "apex:O2", "half:bf16,kahan")


def _remarks_behind(behind: Any, arm: str) -> list[str]:
    """Put an arm behind the names of this process, and return the list that its remarks will be in."""
    recorder = Recorder(None, {})
    found: list[str] = []
    recorder.call_after_each_row(lambda row: found.append(row["text"]) if row["kind"] == "remark" else None)
    behind(arm, RecordedSteps(recorder))
    return found


def _train(
    model: Any, optimizer: Any, *, closure: bool = False, clear_first: bool = False, factor: float = 1
) -> None:
    def loss_of_batch() -> Any:
        optimizer.zero_grad()
        loss = factor * (model(torch.randn(4, 8)).float() - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        if closure:
            optimizer.step(loss_of_batch)
            continue
        loss_of_batch()
        if clear_first:
            optimizer.zero_grad()
        optimizer.step()


@pytest.mark.parametrize("arm", ARMS)
def test_gradients_of_zero_are_named(behind: Any, arm: str) -> None:
    found = _remarks_behind(behind, arm)
    model = nn.Linear(8, 2)
    _train(model, Adam(model.parameters(), 0.01), factor=0)
    (text,) = found
    assert text.startswith("all gradients of the 2 weights of Adam are zero in its first 2 steps, so that it")
    assert "test_first_gradients.py:" in text


def test_gradients_that_are_cleared_before_the_step_are_named(behind: Any) -> None:
    found = _remarks_behind(behind, "script")
    model = nn.Linear(8, 2)
    _train(model, Adam(model.parameters(), 0.01), clear_first=True)
    (text,) = found
    assert text.startswith(
        "Adam got no gradient for any of its 2 weights in its first 2 steps: the loss does not"
    )


def test_an_optimizer_of_other_weights_is_named(behind: Any) -> None:
    """As of a model that was copied behind the optimizer."""
    found = _remarks_behind(behind, "script")
    model = nn.Linear(8, 2)
    optimizer = SGD(model.parameters(), 0.01)
    _train(copy.deepcopy(model), optimizer)
    (text,) = found
    assert "as where the model was copied or made again behind the optimizer" in text


def test_frozen_weights_are_the_reason_where_they_are(behind: Any) -> None:
    """As of a body that is trained from a later epoch on, whose loss does depend on it."""
    found = _remarks_behind(behind, "script")
    body, head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2)
    optimizers = [SGD(body.parameters(), 0.1), SGD(head.parameters(), 0.1)]
    for _ in range(3):
        head(body(torch.randn(4, 8))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    (text,) = found
    assert text.startswith("all 2 weights of SGD are frozen in its first 2 steps, which change nothing (")


class _ZeroHead(nn.Module):
    """Its last layer begins with zeros, so that the first one has no gradient at first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x))


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 2, sparse=True)

    def forward(self, x: Any) -> Any:
        return self.rows(x.argmax(1))


@pytest.mark.parametrize("arm", ARMS)
def test_a_healthy_training_has_no_remark(behind: Any, arm: str) -> None:
    found = _remarks_behind(behind, arm)
    model = _ZeroHead()
    _train(model, SGD(model.parameters(), 0.1))
    assert found == []


@pytest.mark.parametrize("kind", ["closure", "sparse"])
def test_gradients_of_a_closure_and_sparse_ones_count(behind: Any, kind: str) -> None:
    found = _remarks_behind(behind, "script")
    if kind == "closure":
        model: nn.Module = nn.Linear(8, 2)
        _train(model, LBFGS(model.parameters()), closure=True)
    else:
        model = _Table()
        _train(model, SparseAdam(model.parameters()))
    assert found == []


def test_steps_without_gradients_in_the_middle_are_no_matter(behind: Any) -> None:
    """As of a discriminator that waits: the first two steps count, and one with gradients settles it."""
    found = _remarks_behind(behind, "script")
    model = nn.Linear(8, 2)
    optimizer = SGD(model.parameters(), 0.1)
    _train(model, optimizer)
    optimizer.zero_grad()
    for _ in range(4):
        optimizer.step()
    assert found == []
