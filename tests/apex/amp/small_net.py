"""A small network with its optimizer, loss and backward pass, for the tests of `apex.amp`."""

from typing import Any

import torch
from torch import nn

from ampcompare.apex import amp

LEVELS = ("O0", "O1", "O2", "O3")
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(nn.Module):
    """A half-able layer and a batch norm, so that O2 has both kinds of masters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        with torch.no_grad():
            self.fc.weight.copy_(torch.linspace(-0.5, 0.5 + seed, 16).reshape(4, 4))
            self.fc.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.fc(x))


def start(level: str = "O1", **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    # Small enough for half gradients at the first dynamic scale.
    return (model(X).float() * torch.arange(1.0, 5.0) + 1).square().mean() * (factor / 256)


def backward(model: nn.Module, optimizer: Any, factor: float = 1.0, **options: Any) -> None:
    with amp.scale_loss(loss_of(model, factor), optimizer, **options) as scaled:
        scaled.backward()


def grads(optimizer: Any) -> list[torch.Tensor | None]:
    return [p.grad for p in amp.master_params(optimizer)]
