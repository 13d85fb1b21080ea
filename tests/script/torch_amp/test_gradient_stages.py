"""Stages of gradients that no everyday script shows, and what finding them out costs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

SMALL = 2.0**-8  # times the first loss scale it is a number of fp16


def ones() -> tuple[nn.Linear, torch.optim.SGD]:
    """Return a model with the one weight 1, and its optimizer."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=64.0)


def test_a_second_step_after_an_overflow_is_skipped_too(behind: Any) -> None:
    """The gradients are what they were."""
    behind("native:fp16")
    (model, optimizer), (other, _) = ones(), ones()
    (model(torch.full((1, 1), float("inf"))).sum() + other(torch.ones(1, 1)).sum()).backward()
    optimizer.step()
    optimizer.step()
    assert model.weight.item() == 1.0


def test_a_pass_at_a_new_place_waits_once_for_the_device(
    behind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for gradients that are not zero: all tensors in one read."""
    behind("native:fp16")
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    loss = model(torch.ones(1, 2)).sum() * SMALL
    reads: list[Tensor] = []
    to_bool = Tensor.__bool__
    monkeypatch.setattr(Tensor, "__bool__", lambda tensor: (reads.append(tensor), to_bool(tensor))[1])
    loss.backward()
    monkeypatch.undo()
    assert len(reads) == 1
    optimizer.step()
    assert all(bool(param.grad.isfinite().all()) for param in model.parameters() if param.grad is not None)
