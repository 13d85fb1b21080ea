"""The shortest loops a careful user would write by hand, one per number format, with nothing but torch."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import sgd

Batches = Iterator[tuple[Tensor, Tensor]]
Step = Callable[[], None]
Make = Callable[..., torch.optim.Optimizer]  # from parameters and `fused` to the optimizer


def fp32(model: nn.Module, batches: Batches, *, fused: bool = False, make: Make = sgd) -> Step:
    """Plain training."""
    optimizer = make(model.parameters(), fused=fused)

    def step() -> None:
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def autocast_fp16(model: nn.Module, batches: Batches, *, fused: bool = False, make: Make = sgd) -> Step:
    """torch.amp as its documentation shows it."""
    optimizer = make(model.parameters(), fused=fused)
    device = next(model.parameters()).device.type
    scaler = torch.amp.GradScaler(device)

    def step() -> None:
        x, y = next(batches)
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def autocast_bf16(model: nn.Module, batches: Batches, *, fused: bool = False, make: Make = sgd) -> Step:
    """bf16 autocast needs no scaling."""
    optimizer = make(model.parameters(), fused=fused)
    device = next(model.parameters()).device.type

    def step() -> None:
        x, y = next(batches)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def half(model: nn.Module, batches: Batches, *, fused: bool = False, make: Make = sgd) -> Step:
    """`.half()` on model and input, the loss in fp32."""
    model.half()
    optimizer = make(model.parameters(), fused=fused)

    def step() -> None:
        x, y = next(batches)
        loss = F.cross_entropy(model(x.half()).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


LOOPS: dict[str, Callable[..., Step]] = {
    "fp32": fp32,
    "native:fp16": autocast_fp16,
    "native:bf16": autocast_bf16,
    "half": half,
}


def legacy(
    model: nn.Module, batches: Batches, *, amp: Any, opt_level: str, fused: bool = False, make: Make = sgd
) -> Step:
    """The loop of a legacy script, on an object with the surface of `apex.amp`."""
    optimizer = make(model.parameters(), fused=fused)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)

    def step() -> None:
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
