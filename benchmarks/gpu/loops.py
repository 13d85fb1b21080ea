"""Loops by name: hand-written ones, arms of ampcompare, the real Apex, on a ResNet-50 or a tiny network.

A name is a kind and what runs: `bare native:fp16`, `arm apex:O2`, `apex O2`. With `, fused` at its end the optimizer is
torch's fused one, with `, skip` it skips on the device, with `, triton` O2's copies are Triton's, with `, ema` weights
are averaged, with `, drained` twenty steps run in the whole loop of ampcompare, which reads losses and scales at their
end.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bare import LOOPS, Step, legacy
from genuine import load_amp
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import sgd, tiny

__all__ = ["Loop", "build"]

DRAINED_STEPS = 20
BATCH = 16


@dataclass(frozen=True)
class Loop:
    """A loop in its process.

    Attributes:
        step: makes `steps` updates.
    """

    step: Step
    steps: int = 1


def build(name: str, model_name: str, device: str, *, small: bool, apex_src: Path | None) -> Loop:
    """Build a loop with weights and one batch of a seed; raises ImportError where what it needs is not installed.

    Args:
        model_name: "tiny" or "resnet50".
        small: a small twin, for a rehearsal.
    """
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model, x, y = tiny() if model_name == "tiny" else _resnet50(small)
    model, x, y = model.to(device), x.to(device), y.to(device)
    what, *extras = name.split(", ")
    kind, what = what.split(" ", 1)
    fused = "fused" in extras
    batches = itertools.repeat((x, y))
    if kind == "bare":
        return Loop(LOOPS[what](model, batches, fused=fused))
    if kind == "apex":
        if apex_src is None:
            raise ImportError("no --apex-src")
        amp = load_amp(apex_src, kernels=False, weight_cache=what == "O1", device=device)
        return Loop(legacy(model, batches, amp=amp, opt_level=what, fused=fused))
    return _arm(what, model, sgd(model.parameters(), fused=fused), x, y, device, extras)


def _resnet50(small: bool) -> tuple[nn.Module, Tensor, Tensor]:
    if small:
        layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        model: nn.Module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1000))
    else:
        from ampcompare.tasks.torchvision_loader import load_torchvision

        model = load_torchvision().models.resnet50(weights=None)
    batch, size = (2, 8) if small else (BATCH, 224)
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), images, torch.randint(0, 1000, (batch,))


def _arm(
    arm: str, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, device: str, extras: list[str]
) -> Loop:
    from ampcompare.base.tensors.skippable_step import skip_on_device
    from ampcompare.runs.settings.config import ParallelConfig
    from ampcompare.training.assemble import make_parallel
    from ampcompare.training.ema import ModelEma
    from ampcompare.training.loop import Loop as TrainingLoop
    from ampcompare.training.loop import update
    from ampcompare.training.meters import make_clock
    from ampcompare.training.precision.base import make_precision, owned_params

    if "skip" in extras:
        skip_on_device(optimizer)
    if "triton" in extras:
        importlib.import_module("triton")  # an ImportError leaves the loop out
        os.environ["AMPCOMPARE_APEX_KERNELS"] = "triton"  # of this process alone
    precision = make_precision(arm, device=f"{device}:0" if device == "cuda" else device)
    average, owned = (ModelEma([model], 0.999), owned_params(optimizer)) if "ema" in extras else (None, [])
    models, optimizers = precision.prepare([model], [optimizer])
    after: list[Callable[[], None]] = []
    if average is not None:
        average.follow(models, optimizers, owned)
        after.append(average.update)

    def loss_of(models: Any, batch: Any) -> Tensor:
        return F.cross_entropy(models[0](batch[0]), batch[1])

    parallel = make_parallel(ParallelConfig(), torch.device(device))
    if "drained" in extras:
        clock = make_clock(torch.device(device))
        loop = TrainingLoop(models, optimizers, precision, parallel, loss_of, clock, after_step=after)

        def block() -> None:
            for _ in loop.run(itertools.repeat((x, y), DRAINED_STEPS), epoch=0):
                pass

        return Loop(block, DRAINED_STEPS)

    def step() -> None:
        update(models, optimizers, precision, parallel, loss_of, ((x, y),))
        for call in after:
            call()

    return Loop(step)
