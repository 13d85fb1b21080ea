"""The parts of a small Apex script: arms that it runs under, a network and its batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[str], Any]
ARMS = {
    "fp32": "fp32",
    "fp16": "native:fp16,init_scale=1024,growth_interval=3",
    "odd": "native:fp16,init_scale=1000,growth_interval=2",
    "bf16": "native:bf16",
}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch(*key: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def two_networks() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    nets: list[nn.Module] = [nn.Linear(6, 6), nn.Linear(6, 1)]
    return nets, [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]


def gan_loss(
    step: int, who: str, number: int, maker: nn.Module, judge: nn.Module, overflow: tuple[int, str]
) -> Tensor:
    """Return a loss of the maker, or one of the judge's.

    Args:
        number: of the loss in this step, from 0.
        overflow: step and network whose first loss is infinite.
    """
    x, _ = batch(step, number)
    if who == "maker":
        loss = judge(maker(x)).float().square().mean()
    else:
        loss = (judge(maker(x).detach()).float() - number).square().mean()
    return loss * (float("inf") if overflow == (step, who) and number == 0 else 1)
