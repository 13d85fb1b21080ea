"""Whether `diagnose` names planted faults, proposes nothing for healthy networks, and what watching costs.

    python benchmarks/diagnose.py [--part faults|cost|all] [--rounds 15] [--note TEXT] [--out docs/benchmarks/diagnose]

Faults: each network of `tests/diagnosis/faults.py` is diagnosed; it is right if the planted place, and nothing else,
is proposed as the cure, and named if the first line has it, as the place, the reason or the cure. Those `held out`
were written after the thresholds of the diagnosis were settled, and changed none of them; `new`, `everyday` and
`written` later still, before the diagnosis first ran on them: in that first run 9 of the 12 everyday ones and 12 of
the 15 written ones were right, and all of the 20 healthy ones. Four for `native:fp16` (squared ReLU, softplus,
contrastive loss, mean of beginnings) have no fault since a CPU casts as CUDA: their powers, exponentials and sums are
in fp32, nothing is proposed, and they count as not right. Two without a scale (tiny gradients, faint loss) need fp32
masters as well: behind the unscaling their fp16 gradients are zero again. Cost: one step of the medium model on the CPU
clock of the process with one thread, bare, with ranges, and with ranges and drift, in random order; a row is the median
of the ratios of a round.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import torch
from harness import make_table, median_ratio, take_turns, write_results
from torch.nn import functional as F
from workloads import WORKLOADS, sgd

import ampcompare
from ampcompare import Precision
from ampcompare.diagnosis.observation import RunObservation
from ampcompare.diagnosis.step_watch import StepOperationsWatch
from ampcompare.diagnosis.watched_loop import ObservedPrecision
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from tests.diagnosis.faults import NETWORKS, is_found, is_named, proposed

ARMS = ("apex:O1", "apex:O2", "native:fp16", "native:bf16", "half:masters=fp32,dynamic")
WAYS = {"bare": 0.0, "ranges": 3.0, "drift": 6.0}  # name: largest ratio that is a goal


def faults() -> list[dict[str, Any]]:
    """Diagnose every network."""
    rows = []
    for network in NETWORKS:
        begin = time.perf_counter()
        found = ampcompare.diagnose(network.loop, arm=network.arm, device="cpu")
        rows.append(
            {
                "kind": network.kind,
                "network": network.name,
                "arm": network.arm,
                "planted": network.place,
                "proposed": ", ".join(proposed(found)),
                "named": is_named(network, found) if network.place else None,
                "right": is_found(network, found)
                if network.place
                else found.cure is None and not found.faults,
                "trials": len(found.trials),
                "seconds": time.perf_counter() - begin,
            }
        )
        click.echo(f"{rows[-1]}", err=True)
    return rows


def steps_of(arm: str, way: str, model_name: str) -> tuple[Callable[[], None], ExitStack]:
    """Return a function that makes one step of a model, and what to close afterwards."""
    stack = ExitStack()
    precision: Precision = ampcompare.make_precision(arm, device="cpu")
    stack.enter_context(
        choose_cpu_half_mode_and_context("auto", precision.half_dtype, torch.device("cpu"))[1]
    )
    if way != "bare":
        wide = torch.float32 if way == "drift" else None
        watch = StepOperationsWatch(RunObservation(keep=2), steps=10**9, reference=wide)
        stack.callback(watch.close)
        precision = ObservedPrecision(precision, watch)
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


def cost(rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row per arm and way on the medium model; each turn has a model of its own and a step to warm up."""
    from ampcompare.apex.amp._amp_state import _amp_state

    for arm in ARMS:
        stack = ExitStack()
        step: Callable[[], None] = print

        def prepare(way: str, arm: str = arm) -> None:
            nonlocal step, stack
            stack.close()
            _amp_state.close()
            step, stack = steps_of(arm, way, "medium")
            step()

        def train() -> None:
            for _ in range(steps):
                step()  # noqa: B023 (called in this turn of the loop)

        seconds = take_turns(dict.fromkeys(WAYS, train), rounds, steps=steps, before=prepare)
        stack.close()
        _amp_state.close()
        for way, goal in WAYS.items():
            ratio = median_ratio(seconds, way, "bare")
            row = {
                "arm": arm,
                "way": way,
                "ms": 1e3 * statistics.median(seconds[way]),
                "ratio": ratio,
                "goal": goal,
            }
            click.echo(f"{row}", err=True)
            yield row


def tables(found: list[dict[str, Any]], costs: list[dict[str, Any]]) -> str:
    """Return the page."""
    parts = []
    if found:
        kinds = list(dict.fromkeys(row["kind"] for row in found))
        groups = {kind: [row for row in found if row["kind"] == kind] for kind in kinds}
        shown = [
            [kind, len(rows), sum(row["right"] for row in rows), _sum([row["named"] for row in rows])]
            for kind, rows in groups.items()
        ]
        parts.append(
            "Right is the planted place as the only proposal, or no fault and no cure for a healthy network."
        )
        parts.append(make_table(shown, ["kind", "networks", "right", "in the first line"]))
        columns = ("kind", "network", "arm", "planted", "proposed")
        wrong = [[row[name] for name in columns] for row in found if not row["right"]]
        parts.append("All that were not right; each network is in the JSON.")
        parts.append(make_table(wrong, columns))
    if costs:
        arms = {row["arm"]: {one["way"]: one for one in costs if one["arm"] == row["arm"]} for row in costs}
        shown = [
            [arm, f"{its['bare']['ms']:.2f}", *(_cost(its[way]) for way in its if way != "bare")]
            for arm, its in arms.items()
        ]
        ways = [way for way in dict.fromkeys(row["way"] for row in costs) if way != "bare"]
        parts.append("Cost of a step of the medium model, over the bare one:")
        parts.append(make_table(shown, ["arm", "bare ms", *ways]))
    return "\n\n".join(parts)


def _cost(row: dict[str, Any]) -> str:
    ratio, goal = f"{row['ratio']:.2f}", row["goal"]
    return f"{ratio}, goal {goal:g}: {'yes' if row['ratio'] <= goal else 'no'}" if goal else ratio


def _sum(named: list[bool | None]) -> str:
    return "-" if None in named else str(sum(map(bool, named)))


@click.command()
@click.option("--part", type=click.Choice(["faults", "cost", "all"]), default="all", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=8, show_default=True)
@click.option("--note", default="", help="What else a reader must know of the machine, such as its load.")
@click.option("--out", default=None, help="Path of the page and its numbers, without suffix.")
@click.option("--page", is_flag=True, help="Only write the page again, from its numbers.")
def main(part: str, rounds: int, steps: int, note: str, out: str | None, page: bool) -> None:
    """Measure, print and write."""
    if page and out is not None:
        data = json.loads(Path(f"{out}.json").read_text(encoding="utf-8"))
        write(out, data["environment"], data["faults"], data["cost"])
        return
    torch.set_num_threads(1)
    found = faults() if part != "cost" else []
    costs = list(cost(rounds, steps)) if part != "faults" else []
    click.echo(tables(found, costs))
    if out is not None:
        machine = platform.processor() or platform.machine()
        facts = ", ".join(filter(None, [f"torch {torch.__version__}", "one thread", machine, note]))
        write(out, facts, found, costs)


def write(out: str, facts: str, found: list[dict[str, Any]], costs: list[dict[str, Any]]) -> None:
    """Write the page and its numbers."""
    title = "What diagnose finds, and what it costs"
    write_results(out, title, __doc__, facts, tables(found, costs), {"faults": found, "cost": costs})


if __name__ == "__main__":
    main()
