"""Training steps of optimizers whose fused kernels take the overflow flag."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ampcompare.apex import amp
from ampcompare.apex.amp.scaler import LossScaler
from tests.apex.amp.small_net import Net, loss_of

Make = Callable[[Any], torch.optim.Optimizer]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, fused=True),
    "sgd-momentum": lambda params: torch.optim.SGD(
        params, lr=0.05, momentum=0.9, weight_decay=1e-3, fused=True
    ),
    "sgd-nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "adamw-amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, fused=True),
}


def read_scale_and_good_steps(optimizer: torch.optim.Optimizer) -> None:
    """Keep an optimizer on the path that reads flags: Apex's skip runs no hooks, so hooks ask for it."""
    optimizer.register_step_post_hook(lambda *_: None)


def start(level: str, make: Make = OPTIMIZERS["sgd-momentum"], *, host: bool = False, **options: Any) -> Any:
    model = Net()
    optimizer = make(model.parameters())
    if host:
        read_scale_and_good_steps(optimizer)
    return amp.initialize(
        model, optimizer, opt_level=level, **{"loss_scale": "dynamic", "verbosity": 0, **options}
    )


def train_step(model: nn.Module, optimizer: Any, factor: float = 1.0, **options: Any) -> None:
    with amp.scale_loss(loss_of(model, factor), optimizer, **options) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(tensors: Any) -> list[Any]:
    return [tensor.detach().float().view(torch.int32).tolist() for tensor in tensors]


def moments(optimizer: torch.optim.Optimizer) -> list[Any]:
    return bits(
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


@contextmanager
def passes_on_device() -> Iterator[list[bool]]:
    """Note for each exit of `scale_loss` that it went the way without host reads."""
    seen: list[bool] = []
    original = LossScaler.end_device_pass

    def end(self: LossScaler, *, update: bool) -> None:
        seen.append(update)
        original(self, update=update)

    LossScaler.end_device_pass = end  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        LossScaler.end_device_pass = original  # type: ignore[method-assign]
