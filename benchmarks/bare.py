"""The shortest loops a careful user would write by hand, one per number format, with nothing but torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import sgd

__all__ = ["LOOPS"]

Batches = Iterator[tuple[Tensor, Tensor]]
Step = Callable[[], None]


def fp32(model: nn.Module, batches: Batches) -> Step:
    """Plain training."""
    optimizer = sgd(model.parameters())

    def step() -> None:
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def autocast_fp16(model: nn.Module, batches: Batches) -> Step:
    """torch.amp as its documentation shows it."""
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        x, y = next(batches)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def autocast_bf16(model: nn.Module, batches: Batches) -> Step:
    """bf16 autocast needs no scaling."""
    optimizer = sgd(model.parameters())

    def step() -> None:
        x, y = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def half(model: nn.Module, batches: Batches) -> Step:
    """`.half()` on model and input, the loss in fp32."""
    model.half()
    optimizer = sgd(model.parameters())

    def step() -> None:
        x, y = next(batches)
        loss = F.cross_entropy(model(x.half()).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


LOOPS: dict[str, Callable[[nn.Module, Batches], Step]] = {
    "fp32": fp32,
    "native:fp16": autocast_fp16,
    "native:bf16": autocast_bf16,
    "half": half,
}
