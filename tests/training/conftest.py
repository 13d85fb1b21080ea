"""The end of O1's patches after each test, and a small run with an average that several files train."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampcompare.training.ema import ModelEma
from ampcompare.training.precision.base import make_precision, owned_params


class AveragedRun:
    """A prepared model with batch norm, an optimizer with momentum, and an average that follows the weights."""

    X = torch.linspace(-1, 1, 24).reshape(6, 4)

    def __init__(self, arm: str, decay: float = 0.5) -> None:
        model = self.net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.average = ModelEma([model], decay)
        self.precision = make_precision(arm)
        owned = owned_params(optimizer)
        (self.model,), (self.optimizer,) = self.precision.prepare([model], [optimizer])
        self.average.follow([self.model], [self.optimizer], owned)

    @staticmethod
    def net() -> nn.Sequential:
        """Return the network before it is prepared, the same at every call."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

    def step(self, x: Tensor = X) -> None:
        """Make one update, and one of the average."""
        with self.precision.autocast():
            loss = self.model(x).float().square().mean()
        self.precision.backward(loss, [self.optimizer])
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad()
        self.average.update()

    def stored(self) -> list[Tensor]:
        """Return copies of what the model holds."""
        return [tensor.clone() for tensor in (*self.model.parameters(), *self.model.buffers())]

    def averaged(self) -> dict[str, Tensor]:
        (model,) = self.average.state_dict()["models"]
        return dict(model)


@pytest.fixture
def averaged_run() -> Callable[..., AveragedRun]:
    """Make an `AveragedRun` of an arm."""
    return AveragedRun


@pytest.fixture(autouse=True)
def closed_amp_session() -> Iterator[None]:
    """Take O1's patches off torch again."""
    yield
    from ampcompare.apex.amp import _amp_state

    _amp_state.close()
