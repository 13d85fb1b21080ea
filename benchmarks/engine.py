"""Host time of our Apex engine, as ratios to hand-written loops and to the real Apex.

    python benchmarks/engine.py [--apex-src DIR] [--repetitions 3] [--out docs/benchmarks/engine]

Every loop has a process of its own, as O1 patches torch for the life of one. In each round every process runs one block
of steps, in random order, on its own CPU clock with one thread (on CUDA: the wall clock, with a synchronization at the
end of the block). A ratio is taken within a round; a row is the median of the repetitions' medians, with their range.
Calls of functions and ATen operations of a step are exact counts above the bare loop of the same format, and so are, on
CUDA, kernels and host reads.

The real Apex is release 25.05: on a CPU its Python as it is, from `--apex-src` or $APEX_SRC, with its compiled kernels
stood in for by torch's (`benchmarks/genuine.py`); on CUDA the installed one. On the medium model a row meets its goal
inside the spread of the A/A row: 90 of 100 rounds of the bare fp32 loop against a second process of the same.
"""

import itertools
import json
import multiprocessing
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch
from bare import LOOPS, Step, legacy
from counts import count_calls, count_operations
from genuine import load_amp
from harness import make_table, write_results
from torch import Tensor, nn
from workloads import WORKLOADS

PRELOADED = ["torch", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "click", "tabulate"]
BLOCK = {"tiny": 20, "deep": 8, "medium": 2}
ROUNDS = {"tiny": 60, "deep": 60, "medium": 20}
SLOW_ROUNDS = 6  # of one step: fp16 convolutions have no hardware on most CPUs
AA = "a/a"


@dataclass(frozen=True)
class Row:
    """A loop, whether its optimizer is fused, and the row of the bare loop of its number format."""

    loop: str
    fused: bool
    bare: str


ROWS = {
    "bare fp32": Row("fp32", False, "bare fp32"),
    AA: Row("fp32", False, "bare fp32"),
    "bare torch.amp": Row("native:fp16", False, "bare torch.amp"),
    "bare torch.amp, fused": Row("native:fp16", True, "bare torch.amp, fused"),
    "bare half": Row("half", False, "bare half"),
    "bare half, fused": Row("half", True, "bare half, fused"),
    "compat O0": Row("compat:O0", False, "bare fp32"),
    "compat O1": Row("compat:O1", False, "bare torch.amp"),
    "compat O1, fused": Row("compat:O1", True, "bare torch.amp, fused"),
    "compat O2": Row("compat:O2", False, "bare half"),
    "compat O2, fused": Row("compat:O2", True, "bare half, fused"),
    "compat O3": Row("compat:O3", False, "bare half"),
    "apex O0": Row("nvidia:O0", False, "bare fp32"),
    "apex O1": Row("nvidia:O1", False, "bare torch.amp"),
    "apex O1, fused": Row("nvidia:O1", True, "bare torch.amp, fused"),
    "apex O2": Row("nvidia:O2", False, "bare half"),
    "apex O2, fused": Row("nvidia:O2", True, "bare half, fused"),
    "apex O2, Python only": Row("python:O2", False, "bare half"),
    "apex O3": Row("nvidia:O3", False, "bare half"),
}


@dataclass(frozen=True)
class Goal:
    """What a row may cost at most, as a ratio to another row, by model."""

    row: str
    base: str
    most: dict[str, float] = field(default_factory=lambda: {"tiny": 1.0, "deep": 1.0, "medium": 1.0})


# On the medium model the spread of the A/A row is added to a ratio to a bare loop: it stands for "no cost to be seen".
GOALS = [
    Goal("compat O0", "bare fp32", {"tiny": 1.02, "deep": 1.02, "medium": 1.0}),
    Goal("compat O1", "bare torch.amp", {"tiny": 0.90, "deep": 0.97, "medium": 1.0}),
    Goal("compat O1, fused", "bare torch.amp, fused", {"tiny": 0.97, "deep": 0.95, "medium": 1.0}),
    Goal("compat O3", "bare half", {"tiny": 1.05, "deep": 1.05, "medium": 1.0}),
    Goal("compat O2", "apex O2", {"tiny": 0.90, "deep": 0.95, "medium": 1.0}),
    Goal("compat O2, fused", "apex O2, fused", {"tiny": 0.85, "deep": 0.75, "medium": 1.0}),
    Goal("compat O2", "apex O2, Python only"),
    Goal("compat O0", "apex O0"),
    Goal("compat O1", "apex O1"),
    Goal("compat O1, fused", "apex O1, fused"),
    Goal("compat O3", "apex O3"),
]


def build(row: Row, model_name: str, device: str, apex_source: str | None) -> Step:
    """Return the step of one loop; raises ImportError where the real Apex is not there."""
    torch.manual_seed(0)
    model, x, y = WORKLOADS[model_name]()
    model.to(device)
    batches: Iterator[tuple[Tensor, Tensor]] = itertools.repeat((x.to(device), y.to(device)))
    engine, _, level = row.loop.partition(":")
    if row.loop in LOOPS:
        return LOOPS[row.loop](model, batches, fused=row.fused)
    return _build_legacy(_import_amp(engine, level, device, apex_source), level, model, batches, row.fused)


def _import_amp(engine: str, level: str, device: str, apex_source: str | None) -> Any:
    if engine == "compat":
        from ampcompare.apex import amp

        return amp
    if device == "cuda":
        if engine == "python":
            raise ImportError("on CUDA the installed Apex runs as it was built")
        from apex import amp as installed

        return installed
    if apex_source is None:
        raise ImportError("neither --apex-src nor $APEX_SRC tells where the sources of Apex are")
    return load_amp(Path(apex_source), kernels=engine == "nvidia", weight_cache=level == "O1")


def _build_legacy(amp: Any, level: str, model: nn.Module, batches: Any, fused: bool) -> Step:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return legacy(model, batches, amp=amp, opt_level=level, fused=fused)


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
    return kernels, sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)


def serve(pipe: Connection, name: str, model_name: str, device: str, apex_source: str | None) -> None:
    """Be one loop: send facts about its step, then the seconds of a step for each number of steps received."""
    torch.set_num_threads(1)
    try:
        step = build(ROWS[name], model_name, device, apex_source)
    except ImportError as error:
        pipe.send({"missing": str(error)})
        return
    for _ in range(2 if is_slow(name, model_name, device) else 40):
        step()
    facts: dict[str, Any] = {"calls": count_calls(step), "operations": count_operations(step)}
    if device == "cuda":
        facts["kernels"], facts["syncs"] = _kernels_and_syncs(step)
    pipe.send(facts)
    clock = time.process_time_ns if device == "cpu" else time.perf_counter_ns
    while steps := pipe.recv():
        begin = clock()
        for _ in range(steps):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        pipe.send((clock() - begin) / steps / 1e9)


def is_slow(name: str, model_name: str, device: str) -> bool:
    """Return whether a step takes a tenth of a second: convolutions in fp16 on a CPU."""
    return device == "cpu" and model_name == "medium" and ROWS[name].bare != "bare fp32"


def measure(model_name: str, device: str, apex_source: str | None, share: float, seed: int) -> dict[str, Any]:
    """Let all loops take turns; return seconds by row and round, exact counts, and what is missing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipes, processes, facts = {}, [], {}
    for name in ROWS:
        pipes[name], theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(theirs, name, model_name, device, apex_source), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
    for name, pipe in pipes.items():
        try:
            facts[name] = pipe.recv()
        except EOFError:
            raise click.ClickException(f"the loop {name!r} ended before it was ready") from None
    missing = {name: fact["missing"] for name, fact in facts.items() if "missing" in fact}
    ready = [name for name in ROWS if name not in missing]
    shuffler = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(max(2, round(ROUNDS[model_name] * share))):
        shuffler.shuffle(ready)
        for name in ready:
            slow = is_slow(name, model_name, device)
            if not slow or turn < max(2, round(SLOW_ROUNDS * share)):
                pipes[name].send(1 if slow else BLOCK[model_name])
                seconds[name].append(pipes[name].recv())
    for name in ready:
        pipes[name].send(0)
    for process in processes:
        process.join()
    return {"seconds": seconds, "facts": {name: facts[name] for name in seconds}, "missing": missing}


def _ratios(run: dict[str, Any], row: str, base: str) -> list[float]:
    return [a / b for a, b in zip(run["seconds"][row], run["seconds"][base], strict=False)]


def _goals(model: str, runs: list[dict[str, Any]], device: str) -> list[list[str]]:
    pooled = sorted(ratio for run in runs for ratio in _ratios(run, AA, "bare fp32"))
    spread = pooled[int(len(pooled) * 0.95)]
    shown = [
        [
            model,
            AA,
            "bare fp32",
            f"{statistics.median(pooled):.3f}",
            f"{pooled[len(pooled) // 20]:.3f}-{spread:.3f}",
        ]
    ]
    shown[0] += ["", ""]
    for goal in GOALS:
        most = goal.most[model] * (spread if model == "medium" else 1.0)
        cells = [model, goal.row, goal.base]
        if goal.base not in runs[0]["seconds"]:
            shown.append([*cells, "", "", f"{most:.2f}", "not measured"])
            continue
        medians = [statistics.median(_ratios(run, goal.row, goal.base)) for run in runs]
        ratio = statistics.median(medians)
        cells += [f"{ratio:.3f}", f"{min(medians):.3f}-{max(medians):.3f}", f"{most:.2f}"]
        shown.append([*cells, "yes" if ratio <= most else "no"])
    for name in ("compat O1, fused", "compat O2, fused") if device == "cuda" else ():
        syncs = runs[0]["facts"][name]["syncs"]
        shown.append([model, f"{name}: host reads", "", str(syncs), "", "0", "yes" if syncs == 0 else "no"])
    return shown


TITLE = "Host time of the engine"


@click.command()
@click.option("--repetitions", default=3, show_default=True, help="times that fresh processes are made")
@click.option("--share", default=1.0, show_default=True, help="of the usual number of rounds")
@click.option("--models", default="tiny,deep,medium", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--apex-src", default=None, envvar="APEX_SRC", help="folder that holds apex/, release 25.05")
@click.option("--out", default=None, help="write OUT.json and OUT.md")
@click.option("--page", is_flag=True, help="only write OUT.md again, from OUT.json")
def main(
    repetitions: int,
    share: float,
    models: str,
    device: str,
    apex_src: str | None,
    out: str | None,
    page: bool,
) -> None:
    """Measure the engine against hand-written loops and the real Apex."""
    if page and out is not None:
        stored = json.loads(Path(f"{out}.json").read_text(encoding="utf-8"))
        write_results(out, TITLE, __doc__, stored["environment"], text(stored["models"], device))
        return
    begin = time.perf_counter()
    data: list[dict[str, Any]] = []
    for name in models.split(","):
        runs = []
        for seed in range(repetitions):
            runs.append(measure(name, device, apex_src, share, seed))
            click.echo(f"{name}: repetition {seed + 1} of {repetitions}", err=True)
        data.append({"model": name, "runs": runs})
    click.echo(text(data, device))
    if out is not None:
        chip = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
        facts = (
            f"torch {torch.__version__}, Python {sys.version.split()[0]}, {device} ({chip}), one thread, {repetitions} "
            f"repetitions of {ROUNDS} rounds times {share:g}, {time.perf_counter() - begin:.0f} s in all"
        )
        write_results(out, TITLE, __doc__, facts, text(data, device), {"models": data})


def text(data: list[dict[str, Any]], device: str) -> str:
    """Return the table of the page, with columns for each model; times and counts are in the JSON."""
    goals = [row for each in data for row in _goals(each["model"], each["runs"], device)]
    ratios = {
        (model, row, base): (f"{ratio} ({spread})" if spread else ratio)
        + (f", goal {goal}: {met}" if goal else "")
        for model, row, base, ratio, spread, goal, met in goals
    }
    missing = {row: why for each in data for row, why in each["runs"][0]["missing"].items()}
    return "\n\n".join(
        [
            "Ratio, its range over repetitions, and the goal:",
            _by_model(ratios),
            "\n".join(f"- not measured: {row}: {why}" for row, why in missing.items()),
        ]
    )


def _by_model(cells: dict[tuple[str, str, str], str]) -> str:
    models = list(dict.fromkeys(model for model, _, _ in cells))
    lines = list(dict.fromkeys((row, base) for _, row, base in cells))
    shown = [[*line, *(cells.get((model, *line), "") for model in models)] for line in lines]
    return make_table(shown, ["row", "divided by", *models])


if __name__ == "__main__":
    main()
