"""What the recorder of a stack costs: a script alone and under `recorder.py`, in turns, in forked processes.

    python benchmarks/recorder_cost.py [--processes 3] [--models tiny,medium] [--out docs/benchmarks/recorder_cost]

Each block is a process of its own, forked from one that has loaded torch: the script alone, alone again (A/A, the noise
floor), and under the recorder, as `--stack` starts it, in random order. A step is timed on the CPU clock of the process
with one thread. The first ten steps, in which batches are hashed and the norm of the gradients is computed each time,
lie outside of the time; that the norm is computed every sixteenth step, and the writing of rows, lie inside. A ratio is
taken within a round; a row is the median over the rounds of all processes, with its 95 % interval.
"""

import importlib.machinery
import importlib.util
import os
import random
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from harness import ROOT, make_table, ratios, turns_command
from script_cost import interval_of_median, plain_step

RECORDER = ROOT / "ampcompare" / "script" / "recording" / "recorder.py.txt"
STEPS = {"tiny": 320, "deep": 64, "medium": 64}
ROUNDS = {"tiny": 12, "deep": 12, "medium": 12}
FIRST_STEPS = 10
KINDS = ("without", "a/a", "recorded")
GOAL = 1.03  # of the small script
SCRIPT = "import sys\nsys.modules['recorder_cost'].train(sys.argv[1], int(sys.argv[2]))\n"

_recorder: list[ModuleType] = []  # of a block that is recorded
_seconds: list[float] = []  # of a step of the block


def train(model_name: str, steps: int) -> None:
    """Train, and keep the CPU seconds of a step, with its share of the writing of rows."""
    step = plain_step(model_name)
    for _ in range(FIRST_STEPS):
        step()
    _flush()
    begin = time.process_time_ns()
    for _ in range(steps):
        step()
    _flush()
    _seconds.append((time.process_time_ns() - begin) / steps / 1e9)


def _flush() -> None:
    if _recorder:
        _recorder[0].STATE.record.flush()


def _load_recorder() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("recorder", str(RECORDER))
    spec = importlib.util.spec_from_loader("recorder", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _train_block(kind: str, words: list[str], folder: str, seed: int) -> float:
    """Train in a forked process, and return the seconds of a step."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        return float(said)
    torch.manual_seed(seed)
    if kind == "recorded":
        _recorder.append(_load_recorder())
        _recorder[0].main(["--record", f"{folder}/script.jsonl", "--seed", str(seed), *words])
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")
    os.write(writing, repr(_seconds[0]).encode())
    os._exit(0)


def measure(arm: str, model_name: str, seed: int) -> dict[str, Any]:
    """Return the median time of a step without the recorder, in microseconds, and the paired ratios of all rounds."""
    sys.modules["recorder_cost"] = sys.modules[__name__]
    shuffler = random.Random(seed)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT, encoding="utf-8")
        words = [str(script), model_name, str(STEPS[model_name])]
        for _ in range(ROUNDS[model_name]):
            for kind in shuffler.sample(KINDS, len(KINDS)):
                seconds[kind].append(_train_block(kind, words, folder, seed))
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
            shown = [f"{base:.0f}", f"{middle:.3f}", f"{low:.3f}-{high:.3f}", f"{GOAL}" * (kind == "recorded")]
            rows.append([row["model"], kind, *shown, f"{(middle - 1) * base:+.0f}"])
    return make_table(rows, ["model", "row", "us without", "x without", "95 %", "goal", "us more"])


if __name__ == "__main__":
    turns_command(
        __file__,
        "What the recorder of a stack costs",
        __doc__,
        measure,
        table,
        models="tiny,medium",
        arms="script",
        processes=3,
    )()
