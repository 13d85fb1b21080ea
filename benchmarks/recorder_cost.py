"""What the recorder of a stack costs: the recorder switched on and off around the steps of one script.

    python benchmarks/recorder_cost.py [--processes 3] [--models tiny,deep,medium] [--out docs/benchmarks/recorder_cost]

Each process runs a script under `recorder.py`, as `--stack` starts it, and trains blocks of steps in turns, in random
order: without it (torch's own `backward` and `step` are put back), without it again (A/A, the noise floor), and with
it. A block is timed on the CPU clock of the process, with one thread. The first steps, in which batches are hashed and
the norm of the gradients is computed each time, lie outside of the time; that it is computed every 32nd step, and the
writing of the rows of a block, lie inside. A ratio is taken within a round; a row is the median over the rounds of all
processes, with its 95 % interval.
"""

import importlib.machinery
import importlib.util
import random
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
BLOCK = {"tiny": 64, "deep": 64, "medium": 16}  # steps
ROUNDS = {"tiny": 60, "deep": 20, "medium": 12}
FIRST_STEPS = 10
KINDS = ("without", "a/a", "recorded")
GOAL = 1.03  # of the small script
SCRIPT = "import sys\nsys.modules['recorder_cost'].train(sys.argv[1], int(sys.argv[2]))\n"

_recorder: list[ModuleType] = []
_own: list[Any] = []  # torch's own backward and step
_seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}  # of a step


def train(model_name: str, seed: int) -> None:
    """Train blocks of steps in turns, and keep the CPU seconds of a step of each."""
    step, recorded = plain_step(model_name), [torch.autograd.backward, torch.optim.SGD.step]
    for _ in range(FIRST_STEPS):
        step()
    shuffler, flush = random.Random(seed), _recorder[0].STATE.record.flush
    for _ in range(ROUNDS[model_name]):
        for kind in shuffler.sample(KINDS, len(KINDS)):
            torch.autograd.backward, torch.optim.SGD.step = recorded if kind == "recorded" else _own  # type: ignore[assignment, method-assign]
            step()
            flush()
            begin = time.process_time_ns()
            for _ in range(BLOCK[model_name]):
                step()
            if kind == "recorded":
                flush()
            _seconds[kind].append((time.process_time_ns() - begin) / BLOCK[model_name] / 1e9)


def _load_recorder() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("recorder", str(RECORDER))
    spec = importlib.util.spec_from_loader("recorder", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def measure(arm: str, model_name: str, seed: int) -> dict[str, Any]:
    """Return the median time of a step without the recorder, in microseconds, and the paired ratios of all rounds."""
    sys.modules["recorder_cost"] = sys.modules[__name__]
    plain_step(model_name)  # torch wraps the step of a class where its first optimizer is made
    _own[:] = [torch.autograd.backward, torch.optim.SGD.step]
    _recorder.append(_load_recorder())
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT, encoding="utf-8")
        words = [
            "--record",
            f"{folder}/script.jsonl",
            "--seed",
            str(seed),
            str(script),
            model_name,
            str(seed),
        ]
        sys.stdout.flush()
        code = _recorder[0].main(words)
        assert code == 0, code
    return {
        "without_microseconds": statistics.median(_seconds["without"]) * 1e6,
        "ratios": {kind: ratios(_seconds, kind, "without") for kind in KINDS[1:]},
    }


def table(data: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    rows = []
    for row in data:
        base = statistics.median(process["without_microseconds"] for process in row["processes"])
        for kind in KINDS[1:]:
            values = sorted(ratio for process in row["processes"] for ratio in process["ratios"][kind])
            middle, (low, high) = statistics.median(values), interval_of_median(values)
            shown = [
                f"{base:.0f}",
                f"{middle:.3f}",
                f"{low:.3f}-{high:.3f}",
                f"{GOAL}" * (kind == "recorded"),
            ]
            rows.append([row["model"], kind, *shown, f"{(middle - 1) * base:+.0f}"])
    return make_table(rows, ["model", "row", "us without", "x without", "95 %", "goal", "us more"])


if __name__ == "__main__":
    turns_command(
        __file__,
        "What the recorder of a stack costs",
        __doc__,
        measure,
        table,
        models="tiny,deep,medium",
        arms="script",
        processes=3,
    )()
