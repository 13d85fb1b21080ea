"""What recording a script's steps costs: the record of `ampcompare run -- SCRIPT`, switched on and off in one process.

    python benchmarks/script_cost.py [--processes 3] [--arms fp32,native:bf16] [--out docs/benchmarks/script_cost]
    python benchmarks/script_cost.py --arms plain+script,plain+native:bf16

Each process trains a script for Apex (`plain+`: one without mixed precision) behind one arm, in blocks of steps, on the
CPU clock of the process with one thread: without a record, without it again (A/A, the noise floor), with it (losses,
steps, scalars, files, the writing of rows), and the loop written by hand, in random order. Each block makes its own
model, optimizer and arm; this, the first five steps, in which batches are hashed, and the end lie outside the time. A
ratio is taken within a round; a row is the median over the rounds of all processes, with its 95 % interval. A block
without a record still has the audit hook that notes files and code, which Python cannot remove: 0.25 us for each of
about twenty calls of `id` in a step, on a busy machine.
"""

import itertools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from bare import LOOPS
from harness import make_table, ratios, turns_command
from torch.nn import functional as F
from workloads import WORKLOADS, sgd

from ampcompare import Arm
from ampcompare.apex._install import install
from ampcompare.script.behind.stand_in import ArmStandIn
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.recording.recorder import RecordedSteps, Recorder, record_header
from ampcompare.script.watch.cell_facts import CellFactsRecorder

BLOCK = {"tiny": 100, "deep": 60, "medium": 20}
ROUNDS = {"tiny": 50, "deep": 50, "medium": 30}
FIRST_STEPS = 5
KINDS = ("without", "a/a", "recorded", "by hand")
GOAL = 1.02  # of a record, on the medium model
Step = Callable[[], None]


def script_step(model_name: str) -> Step:
    """Return a step as a script for Apex writes it; what stands behind `apex.amp` is set up before."""
    from apex import amp

    model, x, y = WORKLOADS[model_name]()
    model, optimizer = amp.initialize(model, sgd(model.parameters()), opt_level="O1", verbosity=0)

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_step(model_name: str) -> Step:
    """Return a step as a script without mixed precision writes it."""
    model, x, y = WORKLOADS[model_name]()
    optimizer = sgd(model.parameters())

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds_per_step(step: Step, steps: int, finish: Step) -> float:
    """Return the CPU seconds of a step, with its share of `finish`, after the first steps."""
    for _ in range(FIRST_STEPS):
        step()
    finish()
    begin = time.process_time_ns()
    for _ in range(steps):
        step()
    finish()
    return (time.process_time_ns() - begin) / steps / 1e9


def measure(name: str, model_name: str, seed: int) -> dict[str, Any]:
    """Return the median time of a step without a record, in microseconds, and the paired ratios of all rounds.

    Args:
        name: of an arm, after `plain+` where the script has no mixed precision.
    """
    arm = name.removeprefix("plain+")
    make_step = plain_step if arm != name else script_step
    torch.manual_seed(seed)
    install()
    steps, shuffler = BLOCK[model_name], random.Random(seed)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(f"{folder}/record.jsonl", record_header(ExecSettings(name="script")))
        watch = CellFactsRecorder(recorder)
        for _ in range(ROUNDS[model_name]):
            for kind in shuffler.sample(KINDS, len(KINDS)):
                if kind == "by hand":
                    model, *batch = WORKLOADS[model_name]()
                    step = LOOPS["fp32" if arm == "script" else arm](model, itertools.repeat(batch))
                    seconds[kind].append(seconds_per_step(step, steps, lambda: None))
                    continue
                recorded = (
                    (RecordedSteps(recorder), watch, recorder.write_held_rows)
                    if kind == "recorded"
                    else (None, None, lambda: None)
                )
                stand_in = ArmStandIn(Arm.parse(arm), recorded[0], watch=recorded[1])
                seconds[kind].append(seconds_per_step(make_step(model_name), steps, recorded[2]))
                stand_in.end()
        recorder.close(0, None)
    return {
        "without_microseconds": statistics.median(seconds["without"]) * 1e6,
        "ratios": {kind: ratios(seconds, kind, "without") for kind in KINDS[1:]},
    }


def interval_of_median(ordered: list[float]) -> tuple[float, float]:
    """Return the order statistics that enclose the median of their distribution in 95 % of samples, about."""
    reach = 0.98 * math.sqrt(len(ordered))
    first, last = math.floor(len(ordered) / 2 - reach), math.ceil(len(ordered) / 2 + reach) - 1
    return ordered[max(first, 0)], ordered[min(last, len(ordered) - 1)]


def table(data: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    rows = []
    for row in data:
        base = statistics.median(process["without_microseconds"] for process in row["processes"])
        for kind in KINDS[1:]:
            values = sorted(ratio for process in row["processes"] for ratio in process["ratios"][kind])
            middle, (low, high) = statistics.median(values), interval_of_median(values)
            goal = f"{GOAL}" if (row["model"], kind) == ("medium", "recorded") else ""
            shown = [
                f"{base:.0f}",
                f"{middle:.3f}",
                f"{low:.3f}-{high:.3f}",
                goal,
                f"{(middle - 1) * base:+.0f}",
            ]
            rows.append([row["model"], row["arm"], kind, *shown])
    return make_table(rows, ["model", "arm", "row", "us without", "x without", "95 %", "goal", "us more"])


if __name__ == "__main__":
    turns_command(
        __file__,
        "What the record of a script costs",
        __doc__,
        measure,
        table,
        models="tiny,medium",
        arms="fp32,native:bf16",
        processes=3,
    )()
