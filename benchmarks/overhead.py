"""What the seam and the recorded loop cost on the host, as ratios to the shortest hand-written loop of the same format.

    python benchmarks/overhead.py [--processes 5] [--out docs/benchmarks/overhead]

Each process holds four loops of one arm on one model: the bare loop, a copy of it (A/A, the noise floor), the bare loop
written with `Precision` (the seam), and the whole recorded `Loop`. They take turns in blocks of twenty steps, in random
order, on the CPU clock of the process with one thread; a ratio is taken within a round, and shown is the median of the
processes' medians, with the range over processes. Calls of functions and ATen operations of a step are exact counts,
above the bare loop: of the seam, of the loop.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bare import LOOPS
from counts import count_calls, count_operations
from harness import make_table, median_ratio, take_turns, turns_command
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import WORKLOADS, sgd

from ampcompare.settings.config import ParallelConfig
from ampcompare.training.assemble import make_parallel
from ampcompare.training.loop import Loop
from ampcompare.training.meters import HostClock
from ampcompare.training.precision.base import make_precision

BLOCK = 20
ROUNDS = {"tiny": 80, "deep": 40, "medium": 15}
SLOW_ROUNDS = 2  # fp16 convolutions have no hardware on most CPUs
# elsewhere 1.05
GOALS = {("seam", "fp32"): 1.02, ("seam", "native:fp16"): 1.03, ("seam", "native:bf16"): 1.03}
PARALLEL = make_parallel(ParallelConfig(), torch.device("cpu"))
Block = Callable[[], None]


def _batches(model_name: str) -> tuple[nn.Module, Iterator[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model, x, y = WORKLOADS[model_name]()
    return model, itertools.repeat((x, y))


def _loss(models: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(models[0](batch[0]), batch[1])


def bare_block(arm: str, model_name: str) -> Block:
    """Twenty steps of the hand-written loop."""
    step = LOOPS[arm](*_batches(model_name))

    def block() -> None:
        for _ in range(BLOCK):
            step()

    return block


def seam_block(arm: str, model_name: str) -> Block:
    """Twenty steps of the same loop, written with `Precision`."""
    model, batches = _batches(model_name)
    precision = make_precision(arm)
    (model,), (optimizer,) = precision.prepare([model], [sgd(model.parameters())])
    optimizers = [optimizer]

    def block() -> None:
        for _ in range(BLOCK):
            x, y = next(batches)
            with precision.autocast():
                loss = F.cross_entropy(model(x), y)
            precision.backward(loss, optimizers)
            precision.step(optimizer)
            optimizer.zero_grad()

    return block


def loop_block(arm: str, model_name: str) -> Block:
    """Twenty steps of the recorded loop, with the drain that ends them."""
    model, batches = _batches(model_name)
    precision = make_precision(arm)
    models, optimizers = precision.prepare([model], [sgd(model.parameters())])
    loop = Loop(models, optimizers, precision, PARALLEL, _loss, HostClock(), drain_every=BLOCK)
    records = loop.run(batches, epoch=0)

    def block() -> None:
        next(records)

    return block


def measure(arm: str, model_name: str, seed: int) -> dict[str, Any]:
    """Time the four loops in this process; return the medians of the paired ratios, and exact counts."""
    torch.manual_seed(0)
    blocks = {
        "bare": bare_block(arm, model_name),
        "a/a": bare_block(arm, model_name),
        "seam": seam_block(arm, model_name),
        "loop": loop_block(arm, model_name),
    }
    slow = model_name == "medium" and arm in ("native:fp16", "half")
    for block in blocks.values():
        for _ in range(1 if slow else 5):
            block()
    seconds = take_turns(blocks, SLOW_ROUNDS if slow else ROUNDS[model_name], seed, steps=BLOCK)
    calls = {name: count_calls(block) / BLOCK for name, block in blocks.items()}
    operations = {name: count_operations(block) / BLOCK for name, block in blocks.items()}
    others = [name for name in blocks if name != "bare"]
    return {
        "bare_microseconds": statistics.median(seconds["bare"]) * 1e6,
        "ratios": {name: median_ratio(seconds, name, "bare") for name in others},
        "extra_calls": {name: calls[name] - calls["bare"] for name in others},
        "extra_operations": {name: operations[name] - operations["bare"] for name in others},
    }


def table(data: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    headers = ["model", "arm", "bare us", "a/a", "seam", "loop", "calls", "ATen ops"]
    return make_table([_row(row["model"], row["arm"], row["processes"]) for row in data], headers)


def _row(name: str, arm: str, processes: list[dict[str, Any]]) -> list[str]:
    bare = statistics.median(process["bare_microseconds"] for process in processes)
    ratios, calls, operations = [], [], []
    for row in ("a/a", "seam", "loop"):
        medians = [process["ratios"][row] for process in processes]
        goal = GOALS.get((row, arm), 1.05) if name == "tiny" and row != "a/a" else None
        shown = f"{statistics.median(medians):.3f} ({min(medians):.3f}-{max(medians):.3f})"
        ratios.append(shown if goal is None else f"{shown}, goal {goal:.2f}")
        if row != "a/a":
            calls.append(f"{processes[0]['extra_calls'][row]:+.1f}")
            operations.append(f"{processes[0]['extra_operations'][row]:+.1f}")
    return [name, arm, f"{bare:.0f}", *ratios, ", ".join(calls), ", ".join(operations)]


if __name__ == "__main__":
    turns_command(
        __file__,
        "Host overhead",
        __doc__,
        measure,
        table,
        models="tiny,deep,medium",
        arms=",".join(LOOPS),
        processes=5,
    )()
