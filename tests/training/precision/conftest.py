"""Arms to test, and the end of O1's patches after each test."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampcompare.training.precision.base import make_precision


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def trained() -> Callable[[str], list[Tensor]]:
    """Weights of a small network after three steps of an arm."""

    def train(arm: str) -> list[Tensor]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
        precision = make_precision(arm)
        (model,), (optimizer,) = precision.prepare([model], [SGD(model.parameters(), lr=0.1, momentum=0.9)])
        for step in range(3):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            with precision.autocast():
                loss = model(x).float().square().mean()
            precision.backward(loss, [optimizer])
            torch.nn.utils.clip_grad_norm_(precision.unscale(optimizer), 1.0)
            precision.step(optimizer)
            optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]

    return train
