"""The fixed models and batches that loops are timed on: random, seeded, small enough for a CPU."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Workload = tuple[nn.Module, Tensor, Tensor]


def tiny() -> Workload:
    """Two linear layers, 4 parameter tensors: a step is nothing but overhead."""
    return (
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)),
        torch.randn(8, 16),
        torch.randint(0, 10, (8,)),
    )


def deep() -> Workload:
    """Twenty-five linear layers of width 16, 50 parameter tensors: shows Python work per parameter."""
    layers: list[nn.Module] = []
    for _ in range(24):
        layers += [nn.Linear(16, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, 10)), torch.randn(8, 16), torch.randint(0, 10, (8,))


def medium() -> Workload:
    """A small convolutional net with batch norm, 6 to 8 ms a step in fp32: overhead should vanish in it."""
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return model, torch.randn(32, 16, 16, 16), torch.randint(0, 10, (32,))


WORKLOADS: dict[str, Callable[[], Workload]] = {"tiny": tiny, "deep": deep, "medium": medium}


def sgd(params: object, *, fused: bool = False) -> torch.optim.SGD:
    """The optimizer of every loop, in torch's default implementation or the fused one."""
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=1e-4, fused=fused or None)  # type: ignore[arg-type]
