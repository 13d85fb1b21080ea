"""What `compare` costs against bare scripts: time of the demo's matrix over that of one script per cell.

    python benchmarks/matrix.py [--seeds 2] [--out docs/benchmarks/matrix]

The matrix is `ampcompare compare` as `scripts/demo` calls it: start-up, records and reports included. A bare script is
a fresh Python process that trains one of its cells: same data, weights, batches and arithmetic, by the package's own
data and precisions, in a loop that keeps nothing but the last accuracy. They take turns by seed, since the machine
drifts; so the matrix starts once for each seed. The goal is a ratio of at most 0.8 of the wall time: the process server
saves more imports than records cost. Processor time is shown next to it, as a busy machine moves it less.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
from harness import environment, load, make_table, write_results

from ampcompare import Arm
from ampcompare.experiment.plan import DEFAULT_ARMS

GOAL = 0.8
BARE = """
import sys
import torch
from ampcompare.settings.config import Recipe
from ampcompare.training.precision.cpu_half import cpu_half
from ampcompare.training.precision.base import make_precision
from ampcompare.tasks.task import make_task
from ampcompare.training.assemble import assemble_single
from ampcompare.training.evaluate import evaluate

arm, seed = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
device = torch.device("cpu")
recipe = Recipe(seed=seed)
precision = make_precision(arm, device="cpu")
task = make_task(recipe)
run = assemble_single(recipe, task, precision, device)
step = 0
with cpu_half("auto", precision.half_dtype, device)[1]:
    for epoch in range(recipe.epochs):
        for batch in task.data.train_batches(epoch, recipe.batch_size, device=device):
            for optimizer, rates in zip(run.optimizers, run.base_lrs):
                for group, rate in zip(optimizer.param_groups, rates):
                    group["lr"] = rate * run.schedule(step)
            with precision.autocast():
                loss = task.loss(run.models, batch)
            precision.backward(loss, run.optimizers)
            precision.step(*run.optimizers)
            for optimizer in run.optimizers:
                optimizer.zero_grad()
            step += 1
        result = evaluate(run.models, precision, task.data.val_batches(recipe.batch_size, device=device), device)
print(result.counts["top-1"])
"""


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Return the wall time and the processor time of the child processes of some work."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _call(*words: str) -> str:
    command = [sys.executable, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment()).stdout


def _matrix(folder: Path, seed: int) -> None:
    _call("-m", "ampcompare", "compare", "--seeds", str(seed), "--device", "cpu", "-o", str(folder), "--quiet")


def _agree(folder: Path, counts: dict[tuple[str, int], int]) -> int:
    """Return how many cells reached the very accuracy of their bare script."""
    cells = [json.loads(path.read_text()) for path in folder.glob("*/cells/*/record.json")]
    return sum(
        cell["status"] == "completed"
        and cell["summary"]["epochs"][-1]["counts"]["top-1"] == counts[cell["arm"], cell["config"]["recipe"]["seed"]]
        for cell in cells
    )


@click.command()
@click.option("--seeds", default=2, show_default=True)
@click.option("--out", default=None, help="write OUT.json and OUT.md")
def main(seeds: int, out: str | None) -> None:
    """Time the demo's matrix and bare scripts for its cells."""
    matrix, bare = [], []
    counts: dict[tuple[str, int], int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(seeds):
            matrix.append(_timed(lambda seed=seed: _matrix(folder / str(seed), seed)))
            click.echo(f"matrix of seed {seed}: {matrix[-1][0]:.1f} s", err=True)

            def scripts(seed: int = seed) -> None:
                for arm in DEFAULT_ARMS:
                    counts[str(Arm.parse(arm)), seed] = int(_call("-c", BARE, arm, str(seed)))

            bare.append(_timed(scripts))
            click.echo(f"bare scripts of seed {seed}: {bare[-1][0]:.1f} s", err=True)
        equal = _agree(folder, counts)
    rows = []
    for place, kind in enumerate(("wall", "processor")):
        ours, theirs = sum(pair[place] for pair in matrix), sum(pair[place] for pair in bare)
        rows.append([kind, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}", f"{GOAL:g}"])
    table = make_table(rows, ["time", "matrix s", "bare scripts s", "ratio", "goal"])
    text = f"{table}\n\n{len(counts)} cells, {equal} of them with the same final count of right answers in both."
    click.echo(text)
    if out is not None:
        facts = f"{load()}, one thread a run"
        data = {"matrix": matrix, "bare": bare, "cells": len(counts), "equal": equal}
        write_results(out, "The matrix against bare scripts", __doc__, facts, text, data)


if __name__ == "__main__":
    main()
