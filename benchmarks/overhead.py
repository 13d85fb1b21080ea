"""What the seam and the recorded loop cost on the host, as ratios to the shortest hand-written loop of the same format.

    python benchmarks/overhead.py [--processes 5] [--out docs/benchmarks/overhead]

Each process holds four loops of one arm on one model: the bare loop, a copy of it (A/A, the noise floor), the bare loop
written with `Precision` (the seam), and the whole recorded `Loop`. They take turns in blocks of twenty steps, in random
order, on the CPU clock of the process with one thread; a ratio is taken within a round, and shown is the median of the
processes' medians, with the range over processes. Calls of functions and ATen operations of a step are exact counts,
above the bare loop: of the seam, of the loop.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
import torch
from bare import LOOPS
from counts import count_calls, count_operations
from results import write_results
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import WORKLOADS, sgd

from ampcompare.runs.settings.config import ParallelConfig
from ampcompare.training.assemble import make_parallel
from ampcompare.training.loop import Loop
from ampcompare.training.meters import HostClock
from ampcompare.training.precision.base import make_precision

BLOCK = 20
ROUNDS = {"tiny": 80, "deep": 40, "medium": 15}
SLOW_ROUNDS = 2  # fp16 convolutions have no hardware on most CPUs
GOALS = {
    ("seam", "fp32"): 1.02,
    ("seam", "native:fp16"): 1.03,
    ("seam", "native:bf16"): 1.03,
    ("seam", "half"): 1.05,
    ("loop", "fp32"): 1.05,
    ("loop", "native:fp16"): 1.05,
    ("loop", "native:bf16"): 1.05,
    ("loop", "half"): 1.05,
}
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
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = {
        "bare": bare_block(arm, model_name),
        "a/a": bare_block(arm, model_name),
        "seam": seam_block(arm, model_name),
        "loop": loop_block(arm, model_name),
    }
    slow = model_name == "medium" and arm in ("native:fp16", "half")
    rounds = SLOW_ROUNDS if slow else ROUNDS[model_name]
    for block in blocks.values():
        for _ in range(1 if slow else 5):
            block()
    shuffler = random.Random(seed)
    ratios: dict[str, list[float]] = {name: [] for name in blocks}
    bare_seconds = []
    for _ in range(rounds):
        order = list(blocks)
        shuffler.shuffle(order)
        seconds = {}
        for name in order:
            begin = time.process_time_ns()
            blocks[name]()
            seconds[name] = (time.process_time_ns() - begin) / BLOCK / 1e9
        bare_seconds.append(seconds["bare"])
        for name, value in seconds.items():
            ratios[name].append(value / seconds["bare"])
    calls = {name: count_calls(block) / BLOCK for name, block in blocks.items()}
    operations = {name: count_operations(block) / BLOCK for name, block in blocks.items()}
    return {
        "bare_microseconds": statistics.median(bare_seconds) * 1e6,
        "ratios": {name: statistics.median(values) for name, values in ratios.items() if name != "bare"},
        "extra_calls": {name: calls[name] - calls["bare"] for name in calls if name != "bare"},
        "extra_operations": {name: operations[name] - operations["bare"] for name in operations if name != "bare"},
    }


def in_fresh_process(script: str, arm: str, model_name: str, seed: int) -> dict[str, Any]:
    """Return what `measure` of a benchmark's script says in a process of its own."""
    command = [sys.executable, script, "--child", arm, "--models", model_name, "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{arm} on {model_name} failed: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@click.command()
@click.option("--processes", default=5, show_default=True, help="fresh processes per row")
@click.option("--models", default="tiny,deep,medium", show_default=True)
@click.option("--arms", default=",".join(LOOPS), show_default=True)
@click.option("--out", default=None, help="write OUT.json and OUT.md")
@click.option("--page", is_flag=True, help="only write OUT.md again, from OUT.json")
@click.option("--child", default=None, hidden=True)
@click.option("--seed", default=0, hidden=True)
def main(processes: int, models: str, arms: str, out: str | None, page: bool, child: str | None, seed: int) -> None:
    """Measure the host overhead of the seam and of the recorded loop."""
    if page and out is not None:
        stored = json.loads(Path(f"{out}.json").read_text(encoding="utf-8"))
        write_results(out, "Host overhead", __doc__, stored["environment"], table(stored["rows"]))
        return
    if child is not None:
        print(json.dumps(measure(child, models, seed)))
        return
    jobs = [(arm, name, number) for number in range(processes) for name in models.split(",") for arm in arms.split(",")]
    random.Random(1).shuffle(jobs)
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for place, (arm, name, number) in enumerate(jobs, start=1):
        results.setdefault((name, arm), []).append(in_fresh_process(__file__, arm, name, number))
        click.echo(f"[{place}/{len(jobs)}] {arm} on {name}", err=True)
    data = [
        {"model": name, "arm": arm, "processes": results[name, arm]}
        for name in models.split(",")
        for arm in arms.split(",")
    ]
    click.echo(table(data))
    if out is not None:
        facts = (
            f"torch {torch.__version__}, one thread, {torch.backends.cpu.get_cpu_capability()}, {processes} processes"
        )
        write_results(out, "Host overhead", __doc__, facts, table(data), {"rows": data})


def table(data: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    headers = ["model", "arm", "bare us", "a/a", "seam", "loop", "calls", "ATen ops"]
    rows = [_row(each["model"], each["arm"], each["processes"]) for each in data]
    text: str = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    return text


def _row(name: str, arm: str, processes: list[dict[str, Any]]) -> list[str]:
    bare = statistics.median(process["bare_microseconds"] for process in processes)
    ratios, calls, operations = [], [], []
    for row in ("a/a", "seam", "loop"):
        medians = [process["ratios"][row] for process in processes]
        goal = GOALS.get((row, arm)) if name == "tiny" else None
        shown = f"{statistics.median(medians):.3f} ({min(medians):.3f}-{max(medians):.3f})"
        ratios.append(shown if goal is None else f"{shown}, goal {goal:.2f}")
        if row != "a/a":
            calls.append(f"{processes[0]['extra_calls'][row]:+.1f}")
            operations.append(f"{processes[0]['extra_operations'][row]:+.1f}")
    return [name, arm, f"{bare:.0f}", *ratios, ", ".join(calls), ", ".join(operations)]


if __name__ == "__main__":
    main()
