"""What the guards cost a script: the shortest hand-written loop with and without them.

    python benchmarks/guards.py [--processes 5] [--out docs/benchmarks/guards]

Each process holds one loop of one arm on one model, and runs it in blocks of twenty steps on the CPU clock of the
process with one thread: without guards, without them again (A/A, the noise floor), and with them, in random order.
Putting them on and taking them off lies outside the block. A ratio is taken within a round; a row is the median of the
processes' medians, and the range next to it is over processes. In `run` and `compare` the guards have gone before the
first timed step, so that these figures are those of `ampcompare exec` and of `ampcompare.guards.install`.
"""

import contextlib
import statistics
from typing import Any

import torch
from harness import make_table, median_ratio, take_turns, turns_command
from overhead import BLOCK, bare_block

import ampcompare.guards

ROUNDS = {"tiny": 100, "deep": 30, "medium": 10}
ROWS = ("without", "a/a", "with")


def measure(arm: str, model_name: str, seed: int) -> dict[str, Any]:
    """Return the median time of a step without guards, in microseconds, and the medians of the paired ratios."""
    torch.manual_seed(0)
    block = bare_block(arm, model_name)
    for _ in range(5):
        block()
    installed = contextlib.ExitStack()

    def switch_guards(row: str) -> None:
        installed.close()
        if row == "with":
            installed.enter_context(ampcompare.guards.install())

    with installed:
        seconds = take_turns(
            dict.fromkeys(ROWS, block), ROUNDS[model_name], seed, steps=BLOCK, before=switch_guards
        )
    return {
        "without_microseconds": statistics.median(seconds["without"]) * 1e6,
        "ratios": {row: median_ratio(seconds, row, "without") for row in ROWS},
    }


def table(data: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    rows = []
    for each in data:
        base = statistics.median(process["without_microseconds"] for process in each["processes"])
        for row in ROWS[1:]:
            medians = [process["ratios"][row] for process in each["processes"]]
            middle, extent = statistics.median(medians), f"{min(medians):.3f}-{max(medians):.3f}"
            more = f"{(middle - 1) * base:+.0f}"
            rows.append([each["model"], each["arm"], row, f"{base:.0f}", f"{middle:.3f}", extent, more])
    return make_table(rows, ["model", "arm", "row", "us without", "x without", "over processes", "us more"])


if __name__ == "__main__":
    turns_command(
        __file__,
        "What the guards cost",
        __doc__,
        measure,
        table,
        models="tiny,deep",
        arms="fp32,native:bf16",
        processes=5,
    )()
