"""Samples per second of our DistributedDataParallel against torch's, on two gloo ranks of this machine.

    python benchmarks/apex_ddp.py [--rounds 60] [--models medium,deep,wide]

Both train the same model from the same weights on the same batches. They take turns in short blocks, in random order
that both ranks share; the ratio is the median of the rounds' ratios. A second copy of torch's wrapper shows the noise.
"""

from __future__ import annotations

import copy
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import WORKLOADS, Workload, sgd

from ampcompare.apex import DeprecatedFeatureWarning
from ampcompare.apex.parallel import DistributedDataParallel

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch": nn.parallel.DistributedDataParallel,
    "torch again": nn.parallel.DistributedDataParallel,
    "apex": DistributedDataParallel,
    "apex, one bucket": lambda model: DistributedDataParallel(model, message_size=1_000_000_000),
}
BLOCK_SECONDS = 0.1


def wide() -> Workload:
    """1.6 million parameters in three linear layers: little arithmetic, much to send."""
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return model, torch.randn(32, 512), torch.randint(0, 10, (32,))


def stepper(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = sgd(model.parameters())

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None], steps: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def measure(name: str, rounds: int) -> list[list[object]]:
    torch.manual_seed(0)
    model, x, y = wide() if name == "wide" else WORKLOADS[name]()
    loops = {key: stepper(wrap(copy.deepcopy(model)), x, y) for key, wrap in WRAPPERS.items()}
    for loop in loops.values():
        seconds(loop, 5)
    guess = torch.tensor(seconds(loops["torch"], 5))
    dist.all_reduce(guess)
    steps = max(1, int(BLOCK_SECONDS / (guess.item() / dist.get_world_size())))
    times: dict[str, list[float]] = {key: [] for key in loops}
    order = random.Random(0)
    for _ in range(rounds):
        for key in order.sample(list(loops), len(loops)):
            times[key].append(seconds(loops[key], steps))
    rows: list[list[object]] = []
    for key, taken in times.items():
        ratio = statistics.median(base / own for base, own in zip(times["torch"], taken, strict=True))
        rate = len(x) * dist.get_world_size() / statistics.median(taken)
        rows.append([name, key, f"{rate:.0f}", f"{ratio:.3f}"])
    return rows


def work(rank: int, world_size: int, rendezvous: str, models: list[str], rounds: int) -> None:
    warnings.simplefilter("ignore", DeprecatedFeatureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    rows = [row for name in models for row in measure(name, rounds)]
    if rank == 0:
        print(tabulate(rows, headers=["model", "wrapper", "samples/s, both ranks", "ratio to torch"]))
    dist.destroy_process_group()


@click.command(help=__doc__.split("\n")[0])
@click.option("--rounds", default=60, show_default=True, help="Turns that each wrapper takes.")
@click.option("--models", default="medium,deep,wide", show_default=True, help="Names, separated by commas.")
def main(rounds: int, models: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (2, str(Path(folder, "rendezvous")), models.split(","), rounds), nprocs=2)


if __name__ == "__main__":
    main()
