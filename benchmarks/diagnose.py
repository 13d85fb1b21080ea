"""Whether `diagnose` names planted faults, proposes nothing for healthy networks, and what watching costs.

    python benchmarks/diagnose.py [--part faults|cost|all] [--rounds 15] [--note TEXT] [--out docs/benchmarks/diagnose]

Faults: each network of `planted_faults.py` is diagnosed; it is right if the planted place, and nothing else, is
proposed as the cure, and named if the first line has it, as the place, the reason or the cure. HELD_OUT are networks
that were written after the thresholds of the diagnosis were settled, and that changed none of them; those of
`new_faults.py`, `everyday_faults.py` and `written_faults.py` were written later still, before the diagnosis first ran
on them: in that first run 9 of the 12 everyday ones and 12 of the 15 written ones were right, and all of the 20 healthy
ones. Cost: one step of the medium model on the CPU clock of the process with one thread, bare, with ranges, and with
ranges and drift, in random order; a row is the median of the ratios of a round. Load of other processes slows all
three, not by the same factor.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
import torch
from everyday_faults import EVERYDAY_HEALTHY, EVERYDAY_PLANTED
from new_faults import NEW_HEALTHY, NEW_PLANTED
from planted_faults import HEALTHY, HELD_OUT, PLANTED, Network, is_found, is_named, proposed
from results import write_results
from tabulate import tabulate
from torch.nn import functional as F
from workloads import WORKLOADS, sgd
from written_faults import WRITTEN_HEALTHY, WRITTEN_PLANTED

import ampcompare
from ampcompare import Precision
from ampcompare.diagnosis.measure import Observed
from ampcompare.diagnosis.observation import Observation
from ampcompare.diagnosis.step_watch import StepWatch
from ampcompare.training.precision.cpu_half import cpu_half

KINDS = {
    "planted": PLANTED,
    "held out": HELD_OUT,
    "healthy": HEALTHY,
    "new planted": NEW_PLANTED,
    "new healthy": NEW_HEALTHY,
    "everyday planted": EVERYDAY_PLANTED,
    "everyday healthy": EVERYDAY_HEALTHY,
    "written planted": WRITTEN_PLANTED,
    "written healthy": WRITTEN_HEALTHY,
}
ARMS = ("apex:O1", "apex:O2", "native:fp16", "native:bf16", "half:master_weights,dynamic")
WAYS = {"bare": 0.0, "ranges": 3.0, "drift": 6.0}  # name: largest ratio that is a goal


def faults() -> list[dict[str, Any]]:
    """Diagnose every network."""
    rows = []
    for kind, networks in KINDS.items():
        for network in networks:
            begin = time.perf_counter()
            found = ampcompare.diagnose(network.loop, arm=network.arm, device="cpu")
            rows.append(
                {
                    "kind": kind,
                    "network": network.name,
                    "arm": network.arm,
                    "planted": network.place,
                    "proposed": ", ".join(proposed(found)),
                    "named": None if kind.endswith("healthy") else is_named(network, found),
                    "right": _is_right(kind, network, found),
                    "trials": len(found.trials),
                    "seconds": time.perf_counter() - begin,
                }
            )
            click.echo(f"{rows[-1]}", err=True)
    return rows


def _is_right(kind: str, network: Network, found: Any) -> bool:
    return found.cure is None and not found.faults if kind.endswith("healthy") else is_found(network, found)


def steps_of(arm: str, way: str, model_name: str) -> tuple[Callable[[], None], ExitStack]:
    """Return a function that makes one step of a model, and what to close afterwards."""
    stack = ExitStack()
    precision: Precision = ampcompare.make_precision(arm, device="cpu")
    stack.enter_context(cpu_half("auto", precision.half_dtype, torch.device("cpu"))[1])
    if way != "bare":
        wide = torch.float32 if way == "drift" else None
        watch = StepWatch(Observation(keep=2), steps=10**9, reference=wide)
        precision = stack.enter_context(Observed(precision, watch))
    torch.manual_seed(0)
    model, x, y = WORKLOADS[model_name]()
    (model,), (optimizer,) = precision.prepare([model], [sgd(model.parameters())])

    def step() -> None:
        with precision.autocast():
            loss = F.cross_entropy(model(x), y)
        precision.backward(loss, [optimizer])
        precision.step(optimizer)
        optimizer.zero_grad()

    return step, stack


def timed(arm: str, way: str, model_name: str, steps: int) -> float:
    """Return the seconds of CPU time of a step, after one step to warm up."""
    step, stack = steps_of(arm, way, model_name)
    with stack:
        step()
        begin = time.process_time()
        for _ in range(steps):
            step()
        seconds = (time.process_time() - begin) / steps
    _undo_patches()
    return seconds


def _undo_patches() -> None:
    from ampcompare.apex.amp._amp_state import _amp_state

    _amp_state.close()


def cost(rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row per arm and way on the medium model."""
    shuffler = random.Random(0)
    for arm in ARMS:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in shuffler.sample(list(WAYS), len(WAYS)):
                seconds[way].append(timed(arm, way, "medium", steps))
        for way, goal in WAYS.items():
            ratios = [one / bare for one, bare in zip(seconds[way], seconds["bare"], strict=True)]
            ratio = statistics.median(ratios)
            row = {"arm": arm, "way": way, "ms": 1e3 * statistics.median(seconds[way]), "ratio": ratio, "goal": goal}
            click.echo(f"{row}", err=True)
            yield row


def tables(found: list[dict[str, Any]], costs: list[dict[str, Any]]) -> str:
    """Return the page."""
    parts = []
    for kind in KINDS:
        rows = [row for row in found if row["kind"] == kind]
        if rows:
            right = sum(row["right"] for row in rows)
            word = (
                "with no fault and no cure"
                if kind.endswith("healthy")
                else "with the planted place as the only proposal"
            )
            named = (
                "" if kind.endswith("healthy") else f", {sum(row['named'] for row in rows)} with it in the first line"
            )
            parts.append(f"{kind}: {right} of {len(rows)} {word}{named}")
            columns = ("network", "arm", "planted", "proposed", "trials", "named", "right")
            answers = [["yes" if row[name] else "no" for name in columns[-2:]] for row in rows]
            shown = [
                [*(row[name] for name in columns[:-2]), *answer] for row, answer in zip(rows, answers, strict=True)
            ]
            parts.append(tabulate(shown, headers=columns, tablefmt="github"))
    if costs:
        shown = [
            [
                row["arm"],
                row["way"],
                f"{row['ms']:.2f}",
                f"{row['ratio']:.2f}",
                f"{row['goal']:g}" if row["goal"] else "-",
                "-" if not row["goal"] else "yes" if row["ratio"] <= row["goal"] else "no",
            ]
            for row in costs
        ]
        parts.append("cost of a step, medium model")
        parts.append(tabulate(shown, headers=["arm", "watched", "ms", "x bare", "goal", "met"], tablefmt="github"))
    return "\n\n".join(parts)


def _answer(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


@click.command()
@click.option("--part", type=click.Choice(["faults", "cost", "all"]), default="all", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=8, show_default=True)
@click.option("--note", default="", help="What else a reader must know of the machine, such as its load.")
@click.option("--out", default=None, help="Path of the page and its numbers, without suffix.")
def main(part: str, rounds: int, steps: int, note: str, out: str | None) -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    found = faults() if part != "cost" else []
    costs = list(cost(rounds, steps)) if part != "faults" else []
    page = tables(found, costs)
    click.echo(page)
    if out is not None:
        machine = platform.processor() or platform.machine()
        facts = ", ".join(filter(None, [f"torch {torch.__version__}", "one thread", machine, note]))
        title = "What diagnose finds, and what it costs"
        write_results(out, title, __doc__, facts, page, {"faults": found, "cost": costs})


if __name__ == "__main__":
    main()
