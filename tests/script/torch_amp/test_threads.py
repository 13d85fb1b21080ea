"""Scripts that train and evaluate in several threads at a time."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

ARMS = ["native:bf16", "apex:O5", "half:bf16", "half:bf16,masters=fp32"]


class _Meeting(nn.Module):
    """A model whose forward pass waits for that of another one, with the type that its first layer has computed in."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        self.types: list[torch.dtype] = []
        self._barrier = barrier

    def forward(self, x: Tensor) -> Tensor:
        self._barrier.wait(60)
        hidden = self.first(x)
        self.types.append(hidden.dtype)
        self._barrier.wait(60)
        result: Tensor = self.last(torch.relu(hidden))
        return result


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.mark.parametrize("arm", ARMS)
def test_forward_passes_in_two_threads_are_cast(behind: Any, pool: ThreadPoolExecutor, arm: str) -> None:
    behind(arm)
    torch.manual_seed(0)
    barrier = threading.Barrier(2)
    models = [_Meeting(barrier) for _ in range(2)]
    optimizer = SGD([param for model in models for param in model.parameters()], 0.1)
    for _ in range(3):
        x = torch.randn(4, 8)
        losses = list(pool.map(lambda model, x=x: model(x).float().square().mean(), models))
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [model.types for model in models] == [[torch.bfloat16] * 3] * 2


@pytest.mark.parametrize("arm", ARMS)
def test_an_evaluation_next_to_a_training_is_cast(behind: Any, pool: ThreadPoolExecutor, arm: str) -> None:
    behind(arm)
    torch.manual_seed(0)
    barrier = threading.Barrier(2)
    trained, evaluated = _Meeting(barrier), _Meeting(barrier)
    optimizers = [SGD(model.parameters(), 0.1) for model in (trained, evaluated)]

    def evaluate() -> Tensor:
        with torch.no_grad():
            result: Tensor = evaluated(torch.randn(4, 8))
        return result

    for _ in range(3):
        waiting = pool.submit(evaluate)
        trained(torch.randn(4, 8)).float().square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        waiting.result()
    assert [trained.types, evaluated.types] == [[torch.bfloat16] * 3] * 2


def test_a_model_is_called_when_all_are_cast(behind: Any, pool: ThreadPoolExecutor) -> None:
    """The first calls come at the same time, and the first one casts the models of both."""
    behind("half:bf16")
    torch.manual_seed(0)
    models = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(24))) for _ in range(2)]
    optimizer = SGD([param for model in models for param in model.parameters()], 0.1)
    start = threading.Barrier(2)

    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(4, 8)
        start.wait(60)
        result: Tensor = model(x).float().square().mean()
        return result

    torch.stack(list(pool.map(loss_of, models))).sum().backward()
    types = {param.grad.dtype for model in models for param in model.parameters() if param.grad is not None}
    assert types == {torch.bfloat16}
    optimizer.step()
