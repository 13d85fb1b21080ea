"""What the casts of CUDA cost on a CPU: a step of the recorded loop with them, as a ratio to one with the CPU's own.

    python benchmarks/casts.py [--processes 3] [--models tiny,resnet18] [--out docs/benchmarks/casts]

Each process holds three loops of one arm on one model, which run as cells do, 16-bit types emulated: with
`autocast_lists` cpu, with it again (A/A, the noise floor), and with cuda. They take turns in blocks of a few steps, in
random order, on the CPU clock of the process with one thread; a ratio is taken within a round, and shown is the median
of the processes' medians, with the range over processes. ATen operations of a step are exact counts, against the CPU's
own lists: more of them are casts, which is what a GPU does too.
"""

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from counts import count_operations
from harness import make_table, median_ratio, take_turns, turns_command
from torch import nn
from torch.nn import functional as F
from workloads import WORKLOADS, sgd

from ampcompare.settings.config import ParallelConfig
from ampcompare.training.assemble import make_parallel
from ampcompare.training.loop import Loop
from ampcompare.training.meters import HostClock
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context

BLOCK = {"tiny": 5, "resnet18": 1}
ROUNDS = {"tiny": 100, "resnet18": 6}
GOAL = 1.02  # of the tiny model
PARALLEL = make_parallel(ParallelConfig(), torch.device("cpu"))


class Residual(nn.Module):
    """Two convolutions with batch norm next to a shortcut: the basic block of a ResNet."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.short = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm_two(self.two(F.relu(self.norm_one(self.one(x)))))
        return F.relu(inner + self.short(x))


def resnet18() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A ResNet-18 with the first layer for CIFAR, on 8 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width_in = 64
    for width in (64, 128, 256, 512):
        layers += [Residual(width_in, width, 1 if width == 64 else 2), Residual(width, width, 1)]
        width_in = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return model, torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))


def make_block(arm: str, model_name: str, lists: str) -> Callable[[], None]:
    """Return a block of steps of the recorded loop, with the drain that ends them."""
    torch.manual_seed(0)
    model, x, y = resnet18() if model_name == "resnet18" else WORKLOADS[model_name]()
    precision = make_precision(arm, autocast_lists=lists)
    _, context = choose_cpu_half_mode_and_context("auto", precision.half_dtype, torch.device("cpu"), lists)
    models, optimizers = precision.prepare([model], [sgd(model.parameters())])
    loop = Loop(
        models,
        optimizers,
        precision,
        PARALLEL,
        lambda models, batch: F.cross_entropy(models[0](batch[0]), batch[1]),
        HostClock(),
        drain_every=BLOCK[model_name],
    )
    records = loop.run(itertools.repeat((x, y)), epoch=0)

    def block() -> None:
        with context:
            next(records)

    return block


def measure(arm: str, model_name: str, seed: int) -> dict[str, Any]:
    """Time the three loops in this process; return the medians of the paired ratios, and exact counts."""
    blocks = {
        name: make_block(arm, model_name, lists)
        for name, lists in (("cpu", "cpu"), ("a/a", "cpu"), ("cuda", "cuda"))
    }
    for block in blocks.values():
        for _ in range(2):
            block()
    steps = BLOCK[model_name]
    seconds = take_turns(blocks, ROUNDS[model_name], seed, steps=steps)
    operations = {name: count_operations(block) / steps for name, block in blocks.items()}
    return {
        "cpu_microseconds": statistics.median(seconds["cpu"]) * 1e6,
        "ratios": {name: median_ratio(seconds, name, "cpu") for name in ("a/a", "cuda")},
        "extra_operations": operations["cuda"] - operations["cpu"],
    }


def table(data: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    return make_table(
        [_row(row) for row in data], ["model", "arm", "us, cpu lists", "a/a", "cuda", "ATen ops"]
    )


def _row(row: dict[str, Any]) -> list[str]:
    processes = row["processes"]
    shown = [f"{statistics.median(process['cpu_microseconds'] for process in processes):.0f}"]
    for name in ("a/a", "cuda"):
        medians = [process["ratios"][name] for process in processes]
        text = f"{statistics.median(medians):.3f} ({min(medians):.3f}-{max(medians):.3f})"
        shown.append(f"{text}, goal {GOAL}" if (name, row["model"]) == ("cuda", "tiny") else text)
    return [row["model"], row["arm"], *shown, f"{processes[0]['extra_operations']:+.1f}"]


if __name__ == "__main__":
    turns_command(
        __file__,
        "What the casts of CUDA cost on a CPU",
        __doc__,
        measure,
        table,
        models="tiny",
        arms="native:fp16,native:bf16,apex:O1",
        processes=3,
    )()
