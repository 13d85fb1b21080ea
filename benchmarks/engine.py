"""Host time of our Apex engine, as ratios to hand-written loops and, where it can be imported, to the real Apex.

    python benchmarks/engine.py [--rounds 60] [--out docs/benchmarks/engine]

O1 patches torch for the life of a process, so every loop has a process of its own. They take turns in lockstep: in each
round every process runs one block of steps, in random order, timed on its own CPU clock with one thread (on CUDA: on
the wall clock, with a synchronisation at the end of the block). A ratio is taken within a round; a row is the median,
with the range over repetitions with fresh processes. Calls and ATen operations per step are exact counts,
and so are, on CUDA, kernels and host synchronisations.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import WORKLOADS

BLOCK = {"tiny": 20, "deep": 8, "medium": 4}
SLOW_BLOCK = 1  # fp16 convolutions have no hardware on most CPUs
Step = Callable[[], None]

# row: (loop, fused optimizer, row that it is divided by, goal by model)
ROWS: dict[str, tuple[str, bool, str, dict[str, float]]] = {
    "a/a fp32": ("fp32", False, "bare fp32", {}),
    "bare fp32": ("fp32", False, "bare fp32", {}),
    "bare torch.amp": ("amp", False, "bare torch.amp", {}),
    "bare torch.amp, fused": ("amp", True, "bare torch.amp, fused", {}),
    "bare half": ("half", False, "bare half", {}),
    "compat O0": ("compat:O0", False, "bare fp32", {"tiny": 1.02}),
    "compat O1": ("compat:O1", False, "bare torch.amp", {"tiny": 0.90, "deep": 0.97}),
    "compat O1, fused": ("compat:O1", True, "bare torch.amp, fused", {"tiny": 0.97, "deep": 0.95}),
    "compat O2": ("compat:O2", False, "apex O2", {"tiny": 0.90, "deep": 0.95}),
    "compat O2, fused": ("compat:O2", True, "apex O2, fused", {"tiny": 0.85, "deep": 0.75}),
    "compat O3": ("compat:O3", False, "bare half", {"tiny": 1.05}),
    "apex O0": ("nvidia:O0", False, "bare fp32", {}),
    "apex O1": ("nvidia:O1", False, "bare torch.amp", {}),
    "apex O2": ("nvidia:O2", False, "bare half", {}),
    "apex O2, fused": ("nvidia:O2", True, "bare half", {}),
    "apex O3": ("nvidia:O3", False, "bare half", {}),
}


def _optimizer(params: Any, fused: bool) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=1e-4, fused=True if fused else None)


def _start(model_name: str, device: str) -> tuple[nn.Module, Iterator[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model, x, y = WORKLOADS[model_name]()
    return model.to(device), itertools.repeat((x.to(device), y.to(device)))


def plain(model_name: str, fused: bool, device: str) -> Step:
    """The bare fp32 loop."""
    model, batches = _start(model_name, device)
    optimizer = _optimizer(model.parameters(), fused)

    def step() -> None:
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def half(model_name: str, fused: bool, device: str) -> Step:
    """The bare loop on `.half()` weights and inputs."""
    model, batches = _start(model_name, device)
    model.half()
    optimizer = _optimizer(model.parameters(), fused)

    def step() -> None:
        x, y = next(batches)
        loss = F.cross_entropy(model(x.half()).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def native(model_name: str, fused: bool, device: str) -> Step:
    """torch.amp by hand."""
    model, batches = _start(model_name, device)
    optimizer = _optimizer(model.parameters(), fused)
    scaler = torch.amp.GradScaler(device)

    def step() -> None:
        x, y = next(batches)
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def legacy(amp: Any, opt_level: str, model_name: str, fused: bool, device: str) -> Step:
    """The loop of a legacy script, on an object with the surface of `apex.amp`."""
    model, batches = _start(model_name, device)
    optimizer = _optimizer(model.parameters(), fused)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)

    def step() -> None:
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build(loop: str, model_name: str, fused: bool, device: str) -> Step:
    """Return the step of one loop; raises ImportError where the real Apex is not there."""
    engine, _, level = loop.partition(":")
    if engine == "compat":
        from ampcompare.apex import amp

        return legacy(amp, level, model_name, fused, device)
    if engine == "nvidia":
        if device != "cuda":
            raise ImportError("the real Apex runs on CUDA only")
        from apex import amp as real

        return legacy(real, level, model_name, fused, device)
    return {"fp32": plain, "half": half, "amp": native}[loop](model_name, fused, device)


def _calls(step: Step) -> int:
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    step()
    sys.setprofile(None)
    return count


def _operations(step: Step) -> int:
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.seen += 1
            return func(*args, **(kwargs or {}))

    with Count():
        step()
    return Count.seen


def _kernels_and_syncs(step: Step) -> tuple[int, int]:
    """Count CUDA kernels, and the calls by which the host waits for the device."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return kernels, sum("synchroniz" in str(warning.message) for warning in caught)


def serve(row: str, model_name: str, device: str) -> None:
    """Be one loop: answer each line on standard input with the seconds of a block."""
    torch.set_num_threads(1)
    loop, fused, _, _ = ROWS[row]
    try:
        step = build(loop, model_name, fused, device)
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    slow = device == "cpu" and model_name == "medium" and loop not in ("fp32", "compat:O0", "nvidia:O0")
    block = SLOW_BLOCK if slow else BLOCK[model_name]
    for _ in range(3 if slow else 60):
        step()
    facts: dict[str, Any] = {"calls": _calls(step), "operations": _operations(step)}
    if device == "cuda":
        facts["kernels"], facts["syncs"] = _kernels_and_syncs(step)
    print(json.dumps(facts), flush=True)
    clock = time.process_time_ns if device == "cpu" else time.perf_counter_ns
    for _ in sys.stdin:
        begin = clock()
        for _ in range(block):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        print((clock() - begin) / block / 1e9, flush=True)


class Loop:
    """A process that runs one loop on request."""

    def __init__(self, row: str, model_name: str, device: str) -> None:
        command = [sys.executable, __file__, "--serve", row, "--models", model_name, "--device", device]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts: dict[str, Any] = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException(f"a loop ended with exit code {self.process.wait()}")
        return line

    def block(self) -> float:
        """Run a block and return the seconds of one step."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(rows: list[str], model_name: str, device: str, rounds: int, seed: int) -> dict[str, Any]:
    """Let all loops take turns; return seconds by row and round, exact counts, and what is missing."""
    loops = {row: Loop(row, model_name, device) for row in rows}
    missing = {row: loop.facts["missing"] for row, loop in loops.items() if "missing" in loop.facts}
    ready = {row: loop for row, loop in loops.items() if row not in missing}
    shuffler = random.Random(seed)
    seconds: dict[str, list[float]] = {row: [] for row in ready}
    for _ in range(rounds):
        order = list(ready)
        shuffler.shuffle(order)
        for row in order:
            seconds[row].append(ready[row].block())
    for loop in loops.values():
        loop.close()
    return {"seconds": seconds, "facts": {row: loop.facts for row, loop in ready.items()}, "missing": missing}


def _ratio(run: dict[str, Any], row: str, base: str) -> float:
    return statistics.median(a / b for a, b in zip(run["seconds"][row], run["seconds"][base], strict=True))


@click.command()
@click.option("--repetitions", default=3, show_default=True, help="times that fresh processes are made")
@click.option("--rounds", default=60, show_default=True, help="blocks of every loop in one repetition")
@click.option("--models", default="tiny,deep,medium", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--out", default=None, help="write OUT.json and OUT.md")
@click.option("--serve", "served", default=None, hidden=True)
def main(repetitions: int, rounds: int, models: str, device: str, out: str | None, served: str | None) -> None:
    """Measure the engine against hand-written loops and the real Apex."""
    if served is not None:
        serve(served, models, device)
        return
    table_rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for name in models.split(","):
        few = max(4, rounds // 6) if device == "cpu" and name == "medium" else rounds
        runs = []
        for seed in range(repetitions):
            runs.append(measure(list(ROWS), name, device, few, seed))
            click.echo(f"{name}: repetition {seed + 1} of {repetitions}", err=True)
        missing |= runs[0]["missing"]
        for row, (_, _, base, goals) in ROWS.items():
            if row in runs[0]["seconds"]:
                table_rows.append(_shown(name, row, base, goals.get(name), runs))
        data.append({"model": name, "runs": runs})
    headers = ["model", "row", "us/step", "divided by", "ratio", "over repetitions", "goal", "calls", "ATen ops"]
    headers += ["kernels", "syncs"] if device == "cuda" else []
    table = tabulate(table_rows, headers=headers, tablefmt="github", disable_numparse=True)
    notes = "\n".join(f"- not measured: {row}: {why}" for row, why in missing.items())
    click.echo(f"{table}\n\n{notes}")
    if out is not None:
        name = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
        facts = (
            f"torch {torch.__version__}, {device} ({name}), one thread, {repetitions} repetitions of {rounds} rounds"
        )
        text = f"# Host time of the engine\n\n```\n{__doc__}```\n\n{facts}\n\n{table}\n\n{notes}\n"
        Path(out + ".md").write_text(text, encoding="utf-8")
        Path(out + ".json").write_text(json.dumps({"environment": facts, "models": data}) + "\n", encoding="utf-8")


def _shown(name: str, row: str, base: str, goal: float | None, runs: list[dict[str, Any]]) -> list[str]:
    micro = statistics.median(statistics.median(run["seconds"][row]) for run in runs) * 1e6
    facts = runs[0]["facts"]
    shown = [name, row, f"{micro:.0f}", base]
    if base in facts:
        ratios = [_ratio(run, row, base) for run in runs]
        shown += [f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f}-{max(ratios):.3f}"]
        shown += ["" if goal is None else f"{goal:.2f}"]
        shown += [f"{facts[row][what] - facts[base][what]:+d}" for what in ("calls", "operations")]
    else:
        shown += ["", "", "" if goal is None else f"{goal:.2f}", "", ""]
    if "kernels" in facts[row]:
        shown += [str(facts[row]["kernels"]), str(facts[row]["syncs"])]
    return shown


if __name__ == "__main__":
    main()
