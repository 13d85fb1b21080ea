"""What a safe checkpoint costs, over `torch.save` and `torch.load` of the same state.

    python benchmarks/checkpoint.py [--rounds 15] [--out docs/benchmarks/checkpoint]

The state is that of a ResNet-50 with AdamW under O2: fp32 copies of its weights, masters, and two moments, 390 MiB. In
each round every way takes one turn, in random order, on the disk of `--folder`; a ratio is taken within a round, a row
is the median, with quartiles. Each save makes a new file; the disk comes to rest between two turns. `torch.save +
fsync` is what a careful script does; an unsynced save is still in the kernel's memory. Ours writes to another name,
hashes, syncs, reads back, renames and syncs the folder. Loads find the file in the page cache. Processor time, with the
kernel's, stands next to the clock's. Time lost to a save is that of a training loop on one thread, over the same loop
without saves.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from harness import Seconds, load, make_table, ratios, write_results
from torch import nn

from ampcompare.tasks.models import build_model
from ampcompare.training.checkpoint.store.file import read_checkpoint, verify_file, write_checkpoint
from ampcompare.training.checkpoint.store.folder import BackgroundFolder, CheckpointFolder, snapshot

GOAL = 1.3
SAVES = 3
# row: row that it is divided by, goal
ROWS: dict[str, tuple[str, float | None]] = {
    "torch.save, unsynced": ("torch.save + fsync", None),
    "torch.save + fsync": ("torch.save + fsync", None),
    "write_checkpoint": ("torch.save + fsync", GOAL),
    "write_checkpoint over an unsynced save": ("torch.save, unsynced", None),
    "of it, reading back": ("torch.save + fsync", None),
    "snapshot for --async-save": ("torch.save + fsync", None),
    "torch.load": ("torch.load", None),
    "read_checkpoint": ("torch.load", GOAL),
}


def make_state() -> dict[str, Any]:
    """Return a state with the tensors of a ResNet-50 trained by AdamW under O2."""
    torch.manual_seed(0)
    model = build_model("resnet50", num_classes=1000, sample_shape=(3, 224, 224), model_args={})
    masters = {name: param.detach().clone() for name, param in model.named_parameters()}
    moments = {
        index: {"step": torch.tensor(100.0), "exp_avg": torch.randn_like(param), "exp_avg_sq": torch.rand_like(param)}
        for index, param in enumerate(model.parameters())
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": list(moments)}]
    return {
        "model": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "optimizer": {"state": moments, "param_groups": groups},
        "amp": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 100}},
        "masters": masters,
        "arm": "apex:O2",
    }


def save_bare(state: dict[str, Any], path: Path, *, sync: bool) -> None:
    """Save as a script does."""
    with path.open("wb") as file:
        torch.save(state, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def ways(state: dict[str, Any], folder: Path) -> dict[str, Callable[[], Any]]:
    """Return what takes turns; saves make `new.pt`."""
    new, bare, ours = (folder / name for name in ("new.pt", "bare.pt", "ours.pt"))
    return {
        "torch.save, unsynced": lambda: save_bare(state, new, sync=False),
        "torch.save + fsync": lambda: save_bare(state, new, sync=True),
        "write_checkpoint": lambda: write_checkpoint(new, state),
        "of it, reading back": lambda: verify_file(ours),
        "snapshot for --async-save": lambda: snapshot(state),
        "torch.load": lambda: torch.load(bare, weights_only=True),
        "read_checkpoint": lambda: read_checkpoint(ours),
    }


def measure(state: dict[str, Any], folder: Path, rounds: int) -> tuple[Seconds, Seconds]:
    """Return the seconds of each way, by round, on the clock and on the processor."""
    save_bare(state, folder / "bare.pt", sync=True)
    write_checkpoint(folder / "ours.pt", state)
    turns = ways(state, folder)
    seconds: Seconds = {name: [] for name in turns}
    busy: Seconds = {name: [] for name in turns}
    shuffler = random.Random(0)
    for round_ in range(-1, rounds):  # the first one warms up
        for name in shuffler.sample(list(turns), len(turns)):
            (folder / "new.pt").unlink(missing_ok=True)
            os.sync()  # what another way has left to be written or freed is not paid for here
            begin, begin_busy = time.perf_counter(), time.process_time()
            turns[name]()
            taken, taken_busy = time.perf_counter() - begin, time.process_time() - begin_busy
            if round_ >= 0:
                seconds[name].append(taken)
                busy[name].append(taken_busy)
    return seconds, busy


def lost_per_save(state: dict[str, Any], folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return by how many seconds one save makes a training loop longer, synchronous and in the background."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(64, 512)

    def steps(count: int) -> None:
        for _ in range(count):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    begin = time.perf_counter()
    steps(30)
    count = max(10, int(30 * 1.5 / (time.perf_counter() - begin)))  # about a second and a half between two saves
    seconds: dict[str, list[float]] = {"without": [], "synchronous": [], "in the background": []}
    for round_ in range(rounds):
        for name in random.Random(round_).sample(list(seconds), 3):
            plain = CheckpointFolder(folder / name.replace(" ", "-"), keep_last=2)
            behind = BackgroundFolder(plain)
            os.sync()
            begin = time.perf_counter()
            for save in range(SAVES):
                if name == "synchronous":
                    plain.save(state, step=round_ * SAVES + save)
                elif name == "in the background":
                    behind.save(state, step=round_ * SAVES + save)
                steps(count)
            taken = time.perf_counter() - begin
            behind.close()  # the last one is on the disk, and its end would not have held up training
            seconds[name].append(taken / SAVES)
    return seconds


def shown(ratios: list[float]) -> tuple[str, str]:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f}", f"{low:.3f}-{high:.3f}"


@click.command()
@click.option("--rounds", default=15, show_default=True)
@click.option("--folder", default=None, help="where to write; a temporary folder by default")
@click.option("--out", default=None, help="write OUT.json and OUT.md")
def main(rounds: int, folder: str | None, out: str | None) -> None:
    """Measure saves and loads against bare torch."""
    torch.set_num_threads(1)
    state = make_state()
    with tempfile.TemporaryDirectory(dir=folder) as name:
        seconds, busy = measure(state, Path(name), rounds)
        size = (Path(name) / "ours.pt").stat().st_size
        loops = lost_per_save(state, Path(name), max(3, rounds // 3))
    for kind in (seconds, busy):
        kind["write_checkpoint over an unsynced save"] = kind["write_checkpoint"]
    rows = []
    for row, (base, goal) in ROWS.items():
        ratio, spread = shown(ratios(seconds, row, base))
        ratio_busy, _ = shown(ratios(busy, row, base))
        middle, middle_busy = (f"{1000 * statistics.median(kind[row]):.0f}" for kind in (seconds, busy))
        rows.append([row, middle, base, ratio, spread, "" if goal is None else f"{goal:.1f}", middle_busy, ratio_busy])
    table = make_table(rows, ["way", "ms", "divided by", "ratio", "quartiles", "goal", "CPU ms", "CPU ratio"])
    lost = []
    for way in ("synchronous", "in the background"):
        extra = [a - b for a, b in zip(loops[way], loops["without"], strict=True)]
        lost.append([way, f"{1000 * statistics.median(extra):.0f}", f"{1000 * min(extra):.0f}-{1000 * max(extra):.0f}"])
    losses = make_table(lost, ["save", "ms lost per save", "range"])
    facts = f"torch {torch.__version__}, one thread, {rounds} rounds, {size / 2**20:.0f} MiB, {load()}"
    click.echo(f"{facts}\n\n{table}\n\n{losses}")
    if out is not None:
        data = {"seconds": seconds, "cpu_seconds": busy, "loops": loops}
        write_results(out, "Cost of a checkpoint", __doc__, facts, f"{table}\n\n{losses}", data)


if __name__ == "__main__":
    main()
