"""What an arm behind a script's calls costs per step, and what the record of its steps adds.

    python benchmarks/script_cost.py [--processes 5] [--arm fp32,bf16] [--out docs/benchmarks/script-cost]

Each process trains one model and prints the median CPU time of a step over blocks of twenty, on one thread. Four kinds
take turns: the loop written by hand for the arm; a script for Apex under `ampcompare exec --arm`, without and with a
record (losses, steps, first weights and batches, scalars, files); and the hand-written loop again, which is the noise
floor. A row is the median over processes, with their range; ratios are taken within a turn.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from results import write_results
from tabulate import tabulate

BLOCK = 20
ROUNDS = {"tiny": 200, "deep": 60, "medium": 15}
GOAL = 1.02  # with a record, to the same without
KINDS = ("hand", "arm", "recorded", "hand again")


def train(kind: str, arm: str, model_name: str) -> None:
    """Train by hand, or as a script for Apex does, and print the median seconds of a step."""
    import torch
    from torch.nn import functional as F
    from workloads import WORKLOADS, sgd

    torch.manual_seed(0)
    model, x, y = WORKLOADS[model_name]()
    optimizer: Any = sgd(model.parameters())
    amp: Any = None
    if kind == "script":
        from apex import amp

        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    casts = arm == "bf16" and amp is None

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16) if casts else nullcontext():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if amp is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()

    times = []
    for _ in range(ROUNDS[model_name]):
        begin = time.process_time()
        for _ in range(BLOCK):
            step()
        times.append((time.process_time() - begin) / BLOCK)
    print("seconds", statistics.median(times[1:]))


def command_of(kind: str, arm: str, model_name: str, record: Path) -> list[str]:
    """Return the command line of a process."""
    program = [str(Path(__file__).resolve()), "--train"]
    if kind.startswith("hand"):
        return [sys.executable, *program, "hand", arm, model_name]
    options = ["--record", str(record)] if kind == "recorded" else []
    start = [sys.executable, "-m", "ampcompare", "exec", "--arm", arm, *options]
    return [*start, *program, "script", arm, model_name]


def seconds_of(command: list[str]) -> float:
    """Run a process and return what it prints.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("seconds ")]
    if done.returncode or not found:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    return float(found[0])


@click.command()
@click.option("--processes", default=5, show_default=True, help="of each kind")
@click.option("--arm", "arms", default="fp32,bf16", show_default=True)
@click.option("--model", "models", default="medium", show_default=True, help="of tiny, deep and medium")
@click.option("--out", help="write OUT.md and OUT.json")
def main(processes: int, arms: str, models: str, out: str | None) -> None:
    """Print a table of seconds and ratios."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model, arm in itertools.product(models.split(","), arms.split(",")):
            turns = [
                {kind: seconds_of(command_of(kind, arm, model, Path(folder) / "r.jsonl")) for kind in KINDS}
                for _ in range(processes)
            ]
            rows.append([model, arm, f"{1000 * statistics.median(turn['hand'] for turn in turns):.3f}"])
            for top, bottom in (("hand again", "hand"), ("arm", "hand"), ("recorded", "arm"), ("recorded", "hand")):
                ratios = sorted(turn[top] / turn[bottom] for turn in turns)
                rows[-1].append(f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})")
    headers = ["model", "arm", "by hand (ms)", "A/A", "arm / hand", f"recorded / arm (goal {GOAL})", "recorded / hand"]
    text = tabulate(rows, headers=headers, tablefmt="github")
    print(text)
    if out is not None:
        facts = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one thread"
        data = {"rows": [dict(zip(headers, row, strict=True)) for row in rows]}
        write_results(out, "What an arm behind a script costs", __doc__, facts, text, data)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(*sys.argv[2:5])
    else:
        main()
