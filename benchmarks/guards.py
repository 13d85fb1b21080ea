"""What the guards cost a script: the shortest hand-written loop with and without them.

    python benchmarks/guards.py [--processes 5] [--out docs/benchmarks/guards]

Each process holds one loop of one arm on one model, and runs it in blocks of twenty steps on the CPU clock of the
process with one thread: without guards, without them again (A/A, the noise floor), and with them, in random order.
Under `apex:O2` the loop is a legacy script's on ampcompare's engine, and a further row leaves out the guard
`weights-apart`, which follows all weights and their masters.
Putting them on and taking them off lies outside the block. A ratio is taken within a round; a row is the median of the
processes' medians, and the range next to it is over processes. In `run` and `compare` the guards have gone before the
first timed step, so that these figures are those of `ampcompare exec` and of `ampcompare.guards.install`.
"""

import contextlib
import itertools
import statistics
from typing import Any
from unittest import mock

import torch
from bare import legacy
from harness import make_table, median_ratio, take_turns, turns_command
from overhead import BLOCK, Block, bare_block
from workloads import WORKLOADS

import ampcompare.guards
from ampcompare.apex import amp
from ampcompare.guards.checks import DETECTORS

ROUNDS = {"tiny": 100, "deep": 30, "medium": 10}
ROWS = ("without", "a/a", "with")
OF_MASTERS = "weights-apart"
BUT = f"with, but {OF_MASTERS}"


def legacy_block(model_name: str) -> Block:
    """Twenty steps of a legacy script under O2."""
    model, x, y = WORKLOADS[model_name]()
    step = legacy(model, itertools.repeat((x, y)), amp=amp, opt_level="O2")

    def block() -> None:
        for _ in range(BLOCK):
            step()

    return block


def measure(arm: str, model_name: str, seed: int) -> dict[str, Any]:
    """Return the median time of a step without guards, in microseconds, and the medians of the paired ratios."""
    torch.manual_seed(0)
    block = legacy_block(model_name) if arm == "apex:O2" else bare_block(arm, model_name)
    rows = (*ROWS, BUT) if arm == "apex:O2" else ROWS
    for _ in range(5):
        block()
    installed = contextlib.ExitStack()

    def switch_guards(row: str) -> None:
        installed.close()
        if row == BUT:
            others = {name: each for name, each in DETECTORS.items() if name != OF_MASTERS}
            installed.enter_context(mock.patch.dict(DETECTORS, others, clear=True))
        if row.startswith("with,") or row == "with":
            installed.enter_context(ampcompare.guards.install())

    with installed:
        seconds = take_turns(dict.fromkeys(rows, block), ROUNDS[model_name], seed, steps=BLOCK, before=switch_guards)
    return {
        "without_microseconds": statistics.median(seconds["without"]) * 1e6,
        "ratios": {row: median_ratio(seconds, row, "without") for row in rows},
    }


def table(data: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    rows = []
    for each in data:
        base = statistics.median(process["without_microseconds"] for process in each["processes"])
        for row in list(each["processes"][0]["ratios"])[1:]:
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
        arms="fp32,native:bf16,apex:O2",
        processes=5,
    )()
