"""Loops by name: hand-written ones, arms of ampcompare, other libraries as they document themselves, the real Apex.

A name is a kind and what runs: `bare native:fp16`, `arm apex:O2`, `peer accelerate:fp16`, `apex O2`. With `, fused` at
its end the optimizer is torch's fused one, with `, skip` it skips on the device, with `, ema` weights are averaged,
with `, graph` the step is a CUDA graph, with `, drained` twenty steps run in the whole loop of ampcompare, which reads
losses and scales at their end.
"""

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bare import LOOPS, Make, Step, legacy
from genuine import load_amp
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.models import Model, make_model, make_optimizer

DRAINED_STEPS = 20


@dataclass(frozen=True)
class Loop:
    """A loop in its process.

    Attributes:
        step: makes `steps` updates.
    """

    step: Step
    steps: int = 1


def build(
    name: str, model_name: str, device: str, *, small: bool, apex_src: Path | None, batch: int = 0
) -> Loop:
    """Build a loop; raises ImportError where what it needs is not installed."""
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.backends.cudnn.benchmark = True
    made = make_model(model_name, device, small=small, batch=batch or None)
    return build_step(name, made, make_optimizer(model_name), device, apex_src)


def build_step(name: str, made: Model, make: Make, device: str, apex_src: Path | None) -> Loop:
    """Build a loop on a model that is there."""
    what, *extras = name.split(", ")
    kind, what = what.split(" ", 1)
    fused = "fused" in extras
    model, x, y = made
    batches = itertools.repeat((x, y))
    if kind == "bare":
        return Loop(LOOPS[what](model, batches, fused=fused, make=make))
    if kind == "apex":
        if apex_src is None:
            raise ImportError("no --apex-src")
        amp = load_amp(apex_src, kernels=False, weight_cache=what == "O1", device=device)
        return Loop(legacy(model, batches, amp=amp, opt_level=what, fused=fused, make=make))
    optimizer = make(model.parameters(), fused=fused)
    if kind == "peer":
        return Loop(_peer(what, model, optimizer, x, y, device))
    return _arm(what, model, optimizer, x, y, device, extras)


def _arm(
    arm: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    device: str,
    extras: list[str],
) -> Loop:
    from ampcompare.base.tensors.skippable_step import make_step_skippable
    from ampcompare.settings.config import ParallelConfig
    from ampcompare.training.assemble import make_parallel
    from ampcompare.training.build_loop import make_step_graph
    from ampcompare.training.ema import ModelEma
    from ampcompare.training.loop import Loop as TrainingLoop
    from ampcompare.training.loop import update
    from ampcompare.training.meters import make_clock
    from ampcompare.training.precision.base import make_precision, owned_params

    if "skip" in extras:
        make_step_skippable(optimizer)
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

    make_update: Callable[..., object] = update
    if "graph" in extras:
        make_update = make_step_graph(torch.device(device, 0), precision, optimizers)

    def step() -> None:
        make_update(models, optimizers, precision, parallel, loss_of, ((x, y),))
        for call in after:
            call()

    return Loop(step)


def _peer(what: str, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, device: str) -> Step:
    """Return the loop that the documentation of a library shows."""
    library, _, number = what.partition(":")
    if library == "timm":
        from timm.utils import NativeScaler

        scaler = NativeScaler(device=device)

        def timm_step() -> None:
            with torch.autocast(device, dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler(loss, optimizer, parameters=model.parameters())
            optimizer.zero_grad()

        return timm_step
    if library == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision=number, cpu=device == "cpu")
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    else:
        from ampcompare import Arm

        installed = Arm.parse("fabric:32-true").spec.library
        assert installed is not None
        found = installed.find_module_distribution_and_version()
        if found is None:
            raise ImportError(installed.why_missing())
        fabric = importlib.import_module(found[0]).Fabric(accelerator=device, devices=1, precision=number)
        model, optimizer = fabric.setup(model, optimizer)
        backward = partial(fabric.backward, model=model)

    def step() -> None:
        backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    return step
