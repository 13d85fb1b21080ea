"""Samples per second on one rank and on several, per arm and kind of replicas: what reducing gradients costs.

    python benchmarks/scaling.py [--ranks 2] [--repeats 15] [--model medium] [--out docs/benchmarks/scaling]

Six trainings of the same model take turns, in the same processes and in random order within a repeat: one rank alone,
torch's DDP, the same again (the noise), Apex's DDP, torch's DDP without reducing (the share of a step that the
all-reduce takes), and torch's DDP with Apex's SyncBN. Rates and ratios are of the fastest tenth of all steps of a kind,
which nothing disturbed; next to them stands the middle half over repeats of the ratio of their medians. The batch of a
rank is that of the model, so that two ranks work on twice the samples. fp16 is emulated in fp32, as in cells. Ranks
that share cores slow each other down: read the cores and the load.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import load, write_results
from tabulate import tabulate
from torch import Tensor
from torch.nn import functional as F
from workloads import WORKLOADS, sgd

from ampcompare.apex.amp import _amp_state
from ampcompare.runs.settings.config import ParallelConfig
from ampcompare.training.assemble import make_parallel
from ampcompare.training.loop import update
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import cpu_half

STEPS = 10
WARMUP = 3
ARMS = ("fp32", "apex:O1", "apex:O2", "native:bf16", "half")
GOAL = 0.95
VARIANTS = {
    "alone": {"kind": "none"},
    "ddp": {"kind": "ddp"},
    "ddp again": {"kind": "ddp"},
    "apex-ddp": {"kind": "apex-ddp"},
    "local": {"kind": "ddp"},
    "sync-bn": {"kind": "ddp", "sync_bn": "apex"},
}


def _loss(models: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(models[0](batch[0]).float(), batch[1])


def _seconds(model_name: str, arm: str, variant: str) -> tuple[list[float], int]:
    """Return the seconds of each step of one training, by this rank's clock, and its samples."""
    torch.manual_seed(0)
    model, inputs, labels = WORKLOADS[model_name]()
    device = torch.device("cpu")
    precision = make_precision(arm, device="cpu")
    parallel = make_parallel(ParallelConfig.model_validate(VARIANTS[variant]), device, "compat")
    model = parallel.convert_batchnorm(model)
    models, optimizers = precision.prepare([model], [sgd(model.parameters())])
    models = [parallel.wrap(model) for model in models]
    seconds = []
    with cpu_half("auto", precision.half_dtype, device)[1]:
        for _ in range(WARMUP + STEPS):
            if variant == "local":
                dist.barrier()  # elsewhere the exchange keeps ranks together
            begin = time.perf_counter()
            with parallel.no_sync(models, enabled=True) if variant == "local" else nullcontext():
                update(models, optimizers, precision, parallel, _loss, [(inputs, labels)])
            seconds.append(time.perf_counter() - begin)
    return seconds[WARMUP:], len(labels)


def _measure(rank: int, ranks: int, arm: str, model_name: str, repeats: int, meeting: str, out: str) -> None:
    """Be one rank of all trainings of an arm; rank 0 writes the samples of a step and the seconds that it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    variants = [name for name in VARIANTS if name != "sync-bn" or model_name == "medium"]
    seconds: dict[str, list[list[float]]] = {name: [] for name in variants}
    samples, order = 0, random.Random(0)
    for _ in range(repeats):
        for name in order.sample(variants, len(variants)):
            dist.barrier()
            if rank == 0 or name != "alone":
                took, samples = _seconds(model_name, arm, name)
                seconds[name].append(took)
            _amp_state.close()  # one session serves one training
            dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        Path(out).write_text(json.dumps({"samples": samples, "seconds": seconds}))


def _times(arm: str, ranks: int, model_name: str, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        mp.spawn(
            _measure,
            args=(ranks, arm, model_name, repeats, str(Path(folder) / "meeting"), str(result)),
            nprocs=ranks,
        )
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def _row(arm: str, ranks: int, found: dict[str, Any]) -> dict[str, Any]:
    seconds, samples = found["seconds"], found["samples"]

    def fast(name: str) -> float:
        return statistics.quantiles([step for repeat in seconds[name] for step in repeat], n=10)[0]

    def rate(name: str, processes: int) -> float:
        return processes * samples / fast(name)

    pairs = zip(seconds["ddp"], seconds["apex-ddp"], strict=True)
    low, _, high = statistics.quantiles([statistics.median(a) / statistics.median(b) for a, b in pairs], n=4)
    return {
        "arm": arm,
        "1 rank /s": rate("alone", 1),
        f"{ranks} ranks, ddp /s": rate("ddp", ranks),
        f"{ranks} ranks, apex-ddp /s": rate("apex-ddp", ranks),
        "apex-ddp / ddp": fast("ddp") / fast("apex-ddp"),
        "ddp again / ddp": fast("ddp") / fast("ddp again"),
        "apex-ddp / ddp, by repeats": f"{low:.2f} to {high:.2f}",
        "all-reduce share": max(0.0, 1 - fast("local") / fast("ddp")),
        "sync-bn time": fast("sync-bn") / fast("ddp") if "sync-bn" in seconds else None,
    }


@click.command()
@click.option("--ranks", default=2, show_default=True)
@click.option("--repeats", default=15, show_default=True, type=click.IntRange(2))
@click.option("--model", "model_name", type=click.Choice(list(WORKLOADS)), default="medium", show_default=True)
@click.option("--arm", "arms", multiple=True, default=ARMS, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="writes OUT.md and OUT.json")
def main(ranks: int, repeats: int, model_name: str, arms: tuple[str, ...], out: Path | None) -> None:
    """Print one row per arm; apex-ddp / ddp is a ratio of speeds, and above 1 Apex's DDP is the faster one."""
    rows = []
    for arm in arms:
        rows.append(_row(arm, ranks, _times(arm, ranks, model_name, repeats)))
        print(f"{arm} done", file=sys.stderr)
    table = tabulate(rows, headers="keys", floatfmt=".3g", tablefmt="github")
    about = (
        f"Model {model_name}, {ranks} ranks, {load()}, gloo, "
        f"torch {torch.__version__}, {repeats} repeats of {STEPS} steps. Goal of apex-ddp / ddp on the medium model: "
        f"at least {GOAL}."
    )
    print(f"{table}\n\n{about}")
    if out is not None:
        write_results(out, "Several ranks", __doc__, about, table, {"rows": rows})


if __name__ == "__main__":
    main()
