"""What the guards cost a script: the shortest hand-written loop with and without them.

    python benchmarks/guards.py [--processes 5] [--out docs/benchmarks/guards]

Each process holds one loop of one arm on one model, and runs it in blocks of twenty steps on the CPU clock of the
process with one thread: without guards, without them again (A/A, the noise floor), and with them, in random order.
Putting them on and taking them off lies outside the block. A ratio is taken within a round; a row is the median of the
processes' medians, and the range next to it is over processes. In `run` and `compare` the guards have gone before the
first timed step, so that these figures are those of `ampcompare exec` and of `ampcompare.guards.install`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
import torch
from overhead import BLOCK, bare_block, in_fresh_process
from results import write_results
from tabulate import tabulate

import ampcompare.guards

ROUNDS = {"tiny": 100, "deep": 30, "medium": 10}
ROWS = ("without", "a/a", "with")


def measure(arm: str, model_name: str, seed: int) -> dict[str, Any]:
    """Return the median time of a step without guards, in microseconds, and the medians of the paired ratios."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block = bare_block(arm, model_name)
    for _ in range(5):
        block()
    shuffler = random.Random(seed)
    ratios: dict[str, list[float]] = {row: [] for row in ROWS}
    without = []
    for _ in range(ROUNDS[model_name]):
        order = list(ROWS)
        shuffler.shuffle(order)
        seconds = {}
        for row in order:
            with ampcompare.guards.install() if row == "with" else contextlib.nullcontext():
                begin = time.process_time_ns()
                block()
                seconds[row] = (time.process_time_ns() - begin) / BLOCK / 1e9
        without.append(seconds["without"])
        for row, value in seconds.items():
            ratios[row].append(value / seconds["without"])
    return {
        "without_microseconds": statistics.median(without) * 1e6,
        "ratios": {row: statistics.median(values) for row, values in ratios.items()},
    }


@click.command()
@click.option("--processes", default=5, show_default=True, help="fresh processes per row")
@click.option("--models", default="tiny,deep", show_default=True)
@click.option("--arms", default="fp32,native:bf16", show_default=True)
@click.option("--out", default=None, help="write OUT.md")
@click.option("--child", default=None, hidden=True)
@click.option("--seed", default=0, hidden=True)
def main(processes: int, models: str, arms: str, out: str | None, child: str | None, seed: int) -> None:
    """Measure what the guards cost on the host."""
    if child is not None:
        print(json.dumps(measure(child, models, seed)))
        return
    rows = []
    for name in models.split(","):
        for arm in arms.split(","):
            found = [in_fresh_process(__file__, arm, name, number) for number in range(processes)]
            base = statistics.median(one["without_microseconds"] for one in found)
            for row in ROWS[1:]:
                medians = [one["ratios"][row] for one in found]
                middle = statistics.median(medians)
                extent = f"{min(medians):.3f}-{max(medians):.3f}"
                rows.append([name, arm, row, f"{base:.0f}", f"{middle:.3f}", extent, f"{(middle - 1) * base:+.0f}"])
    headers = ["model", "arm", "row", "us without", "x without", "over processes", "us more"]
    table = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    click.echo(table)
    if out is not None:
        facts = f"torch {torch.__version__}, one thread, {processes} processes"
        write_results(out, "What the guards cost", __doc__, facts, table)


if __name__ == "__main__":
    main()
