"""Samples per second on one rank and on several, per arm and kind of replicas: what reducing gradients costs.

    python benchmarks/scaling.py [--ranks 2] [--repeats 5] [--model medium] [--out docs/benchmarks/scaling]

Five trainings of the same model are timed: alone (one rank), torch's DDP, Apex's DDP, torch's DDP without reducing,
which gives the share of a step that the all-reduce takes, and torch's DDP with Apex's SyncBN. Each runs in processes of
its own, since an Apex session serves one training, in random order within a repeat; every ratio is taken within a
repeat, and a row shows medians and the range over repeats. The batch of a rank is that of the model, so that two ranks
work on twice the samples. Ranks that share cores slow each other down: read the cores beside.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import Tensor
from torch.nn import functional as F
from workloads import WORKLOADS, sgd

from ampcompare.config import ParallelConfig
from ampcompare.launch.group import process_group
from ampcompare.launch.world import World
from ampcompare.parallel.factory import make_parallel
from ampcompare.precision.factory import make_precision
from ampcompare.training.loop import update

BLOCK = 10
BLOCKS = 8
ARMS = ("fp32", "apex:O1", "apex:O2", "native:bf16", "half")
GOAL = 0.95
VARIANTS = {
    "alone": {"kind": "none"},
    "ddp": {"kind": "ddp"},
    "apex-ddp": {"kind": "apex-ddp"},
    "local": {"kind": "ddp"},
    "sync-bn": {"kind": "ddp", "sync_bn": "apex"},
}


def _loss(models: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(models[0](batch[0]).float(), batch[1])


def _block(model_name: str, arm: str, variant: str) -> tuple[Callable[[], None], int]:
    """Return a block of steps of one training, and the samples of a step."""
    torch.manual_seed(0)
    model, inputs, labels = WORKLOADS[model_name]()
    device = torch.device("cpu")
    precision = make_precision(arm, device="cpu")
    parallel = make_parallel(ParallelConfig.model_validate(VARIANTS[variant]), device, "compat")
    model = parallel.convert_batchnorm(model)
    models, optimizers = precision.prepare([model], [sgd(model.parameters())])
    models = [parallel.wrap(model) for model in models]

    def run() -> None:
        for _ in range(BLOCK):
            with parallel.no_sync(models, enabled=True) if variant == "local" else nullcontext():
                update(models, optimizers, precision, parallel, _loss, [(inputs, labels)])

    return run, len(labels)


def _measure(rank: int, ranks: int, arm: str, model_name: str, variant: str, meeting: str, out: str) -> None:
    """Be one rank of one training; rank 0 writes the samples of a step and the median seconds that it took."""
    torch.set_num_threads(1)
    world = World(rank, ranks, rank, ranks, f"file://{meeting}", 0, "benchmark")
    with process_group(world, "gloo", "cpu"):
        block, samples = _block(model_name, arm, variant)
        seconds = []
        for _ in range(BLOCKS + 1):
            dist.barrier()
            begin = time.perf_counter()
            block()
            dist.barrier()
            seconds.append((time.perf_counter() - begin) / BLOCK)
        if rank == 0:
            # The first block warms up.
            Path(out).write_text(json.dumps({"samples": samples, "seconds": statistics.median(seconds[1:])}))


def _time(arm: str, ranks: int, model_name: str, variant: str) -> dict[str, Any]:
    processes = 1 if variant == "alone" else ranks
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        job = (processes, arm, model_name, variant, str(Path(folder) / "meeting"), str(result))
        mp.spawn(_measure, args=job, nprocs=processes)
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def _row(arm: str, ranks: int, found: dict[str, Any]) -> dict[str, Any]:
    seconds, samples = found["seconds"], found["samples"]

    def rate(name: str, processes: int) -> float:
        return processes * samples / statistics.median(seconds[name])

    def ratios(one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]

    between = ratios("ddp", "apex-ddp")
    return {
        "arm": arm,
        "1 rank /s": rate("alone", 1),
        f"{ranks} ranks, ddp /s": rate("ddp", ranks),
        f"{ranks} ranks, apex-ddp /s": rate("apex-ddp", ranks),
        "apex-ddp / ddp": statistics.median(between),
        "range": f"{min(between):.2f} to {max(between):.2f}",
        "all-reduce share": max(0.0, 1 - statistics.median(ratios("local", "ddp"))),
        "sync-bn time": statistics.median(ratios("sync-bn", "ddp")) if "sync-bn" in seconds else None,
    }


@click.command()
@click.option("--ranks", default=2, show_default=True)
@click.option("--repeats", default=5, show_default=True)
@click.option("--model", "model_name", type=click.Choice(list(WORKLOADS)), default="medium", show_default=True)
@click.option("--arm", "arms", multiple=True, default=ARMS, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="writes OUT.md and OUT.json")
def main(ranks: int, repeats: int, model_name: str, arms: tuple[str, ...], out: Path | None) -> None:
    """Print one row per arm; apex-ddp / ddp is a ratio of speeds, and above 1 Apex's DDP is the faster one."""
    rows, order = [], random.Random(0)
    variants = [name for name in VARIANTS if name != "sync-bn" or model_name == "medium"]
    for arm in arms:
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(repeats):
            for name in order.sample(variants, len(variants)):
                found = _time(arm, ranks, model_name, name)
                seconds[name].append(found["seconds"])
        rows.append(_row(arm, ranks, {"samples": found["samples"], "seconds": seconds}))
        print(f"{arm} done", file=sys.stderr)
    table = tabulate(rows, headers="keys", floatfmt=".3g", tablefmt="github")
    about = (
        f"Model {model_name}, {ranks} ranks on {os.cpu_count()} cores, gloo, torch {torch.__version__}, "
        f"{repeats} repeats of {BLOCKS} blocks of {BLOCK} steps. Goal of apex-ddp / ddp on the medium model: {GOAL}."
    )
    print(f"{table}\n\n{about}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".md").write_text(f"# Several ranks\n\n{table}\n\n{about}\n")
        out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
