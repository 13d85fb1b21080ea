"""What the remarks on roundings cost a script that keeps an average in bf16 of each of its 64 weights.

    python benchmarks/remark_cost.py [--processes 3] [--out docs/benchmarks/remark_cost]

Each process trains 64 bf16 weights of 256 numbers under the arm `script`, with SGD, in blocks of 202 steps: without the
remarks, without them again (A/A, the noise floor), and with them, in random order, on the CPU clock of the process with
one thread. An average is written behind each step, by `lerp_` or by `mul_` and `add_`. Each block makes its own weights
and arm; this and the first 41 steps, in which all writes are looked at, lie outside the time. Behind them two steps of
101 are looked at, four in a block. A ratio is taken within a round; a row is the median over the rounds of all
processes, with its 95 % interval.
"""

import copy
import io
import random
import statistics
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import torch
from harness import make_table, ratios, turns_command
from script_cost import interval_of_median
from torch import Tensor, nn

from ampcompare import Arm
from ampcompare.apex._install import install
from ampcompare.script.behind.stand_in import ArmStandIn
from ampcompare.script.recording.recorder import RecordedSteps, Recorder
from ampcompare.script.remarks.sampled_calls import FIRST_STEPS, PERIOD

WEIGHTS, NUMBERS = 64, 256
STEPS = 2 * PERIOD
ROUNDS = 15
KINDS = ("without", "a/a", "with remarks")
GOAL = 1.02


class _Silent(ArmStandIn):
    """An arm without remarks on roundings."""

    def _watch_roundings(self, rows: RecordedSteps) -> None:
        pass


def _write_by_lerp(average: Tensor, weight: Tensor) -> None:
    average.lerp_(weight, 0.01)


def _write_by_sum(average: Tensor, weight: Tensor) -> None:
    average.mul_(0.99).add_(weight, alpha=0.01)


WRITES: dict[str, Callable[[Tensor, Tensor], None]] = {
    "lerp_": _write_by_lerp,
    "mul_ and add_": _write_by_sum,
}


def seconds_per_step(write: Callable[[Tensor, Tensor], None]) -> float:
    """Return the CPU seconds of a step, behind those in which all writes are looked at."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(NUMBERS).bfloat16()) for _ in range(WEIGHTS)]
    averages = [copy.deepcopy(weight).requires_grad_(False) for weight in weights]
    optimizer = torch.optim.SGD(weights, 0.01)

    def step() -> None:
        torch.stack(weights).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, weight in zip(averages, weights, strict=True):
                write(average, weight)

    for _ in range(FIRST_STEPS + 1):
        step()
    begin = time.process_time_ns()
    for _ in range(STEPS):
        step()
    return (time.process_time_ns() - begin) / STEPS / 1e9


def measure(arm: str, way: str, seed: int) -> dict[str, Any]:
    """Return the median time of a step without remarks, in microseconds, and the paired ratios of all rounds."""
    install()
    shuffler = random.Random(seed)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(ROUNDS):
        for kind in shuffler.sample(KINDS, len(KINDS)):
            stand_in = (ArmStandIn if kind == "with remarks" else _Silent)(
                Arm.parse(arm), RecordedSteps(Recorder(None, {}))
            )
            with redirect_stderr(io.StringIO()):
                seconds[kind].append(seconds_per_step(WRITES[way]))
            stand_in.end()
    return {
        "without_microseconds": statistics.median(seconds["without"]) * 1e6,
        "ratios": {kind: ratios(seconds, kind, "without") for kind in KINDS[1:]},
    }


def table(data: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    rows = []
    for row in data:
        base = statistics.median(process["without_microseconds"] for process in row["processes"])
        for kind in KINDS[1:]:
            values = sorted(ratio for process in row["processes"] for ratio in process["ratios"][kind])
            middle, (low, high) = statistics.median(values), interval_of_median(values)
            goal = f"{GOAL}" if kind == "with remarks" else ""
            shown = [
                f"{base:.0f}",
                f"{middle:.3f}",
                f"{low:.3f}-{high:.3f}",
                goal,
                f"{(middle - 1) * base:+.0f}",
            ]
            rows.append([row["model"], kind, *shown])
    return make_table(rows, ["averages by", "row", "us without", "x without", "95 %", "goal", "us more"])


if __name__ == "__main__":
    turns_command(
        __file__,
        "What remarks on roundings cost",
        __doc__,
        measure,
        table,
        models=",".join(WRITES),
        arms="script",
        processes=3,
    )()
