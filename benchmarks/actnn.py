"""What packed activations hold, what they cost, and what a network reaches that is trained with them.

    python benchmarks/actnn.py [--rounds 12] [--epochs 5] [--seeds 3] [--out docs/benchmarks/actnn]

Bytes are counted exactly, by hooks: each storage that autograd saves in a forward pass counts once, the weights do not.
All of it is held when the forward pass ends, which is its peak. Times are ratios within a round: the arms take turns in
blocks of steps, in random order, on the CPU clock of the process with one thread. Accuracy is that of whole runs.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from harness import make_table, ratios, take_turns, write_results
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from ampcompare import compare
from ampcompare.settings.recipe import Recipe
from ampcompare.tasks.models import build_model
from ampcompare.training.precision.actnn import ActNN, PackedTensor
from ampcompare.training.precision.base import Precision, make_precision

ARMS = (
    *("fp32", "actnn:bits=8", "actnn:bits=4", "actnn:bits=2"),
    *("native:bf16", "actnn:bits=2,over=native:bf16"),
)
BLOCK = 5


def convnet() -> tuple[nn.Module, Tensor]:
    """The default network of this package, on a batch of digits' shape."""
    model = build_model("convnet", num_classes=10, sample_shape=(1, 8, 8), model_args={})
    return model, torch.randn(64, 1, 8, 8)


def stack() -> tuple[nn.Module, Tensor]:
    """Ten times convolution, batch norm and ReLU, where activations outweigh weights by far."""
    layers: list[nn.Module] = []
    for place in range(10):
        layers += [nn.Conv2d(32 if place else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return model, torch.randn(16, 3, 32, 32)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convnet, digits": convnet,
    "stack, 32x32": stack,
}


class Trainee:
    """One arm of one network, ready to be stepped."""

    def __init__(self, arm: str, network: str) -> None:
        torch.manual_seed(0)
        model, self.x = NETWORKS[network]()
        self.y = torch.arange(len(self.x)) % 10
        self.precision: Precision = make_precision(arm)
        (self.model,), (self.optimizer,) = self.precision.prepare(
            [model], [torch.optim.SGD(model.parameters(), lr=0.01)]
        )

    def forward(self) -> Tensor:
        """Return the loss."""
        with self.precision.autocast():
            return F.cross_entropy(self.model(self.x).float(), self.y)

    def steps(self) -> None:
        """Make a block of updates."""
        for _ in range(BLOCK):
            self.precision.backward(self.forward(), [self.optimizer])
            self.precision.step(self.optimizer)
            self.optimizer.zero_grad()

    def held_bytes(self) -> int:
        """Return the bytes that are saved when a forward pass ends."""
        held: dict[int, int] = {}
        weights = {param.untyped_storage().data_ptr() for param in self.model.parameters()}
        alive: list[Any] = []  # or the place of one that is gone would be taken for another's

        def count(kept: Any) -> Any:
            alive.append(kept)
            if isinstance(kept, PackedTensor):
                held[id(kept)] = kept.nbytes
            elif kept.untyped_storage().data_ptr() not in weights:
                held[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
            return kept

        if isinstance(self.precision, ActNN):
            packer = self.precision.packer
            assert packer is not None
            pack = packer.pack
            packer.pack = lambda tensor: count(pack(tensor))  # type: ignore[method-assign]
            with saved_tensors_hooks(count, lambda kept: kept):  # what the loss saves
                self.forward().backward()
            packer.pack = pack  # type: ignore[method-assign]
        else:
            with saved_tensors_hooks(count, lambda kept: kept):
                self.forward().backward()
        self.optimizer.zero_grad()
        return sum(held.values())


def measure(network: str, rounds: int) -> list[dict[str, Any]]:
    """Return bytes and time ratios of every arm on one network."""
    trainees = {arm: Trainee(arm, network) for arm in ARMS}
    held = {arm: trainee.held_bytes() for arm, trainee in trainees.items()}
    blocks = {arm: trainee.steps for arm, trainee in trainees.items()}
    take_turns(blocks, 1)
    seconds = take_turns(blocks, rounds, steps=BLOCK)
    rows = []
    for arm in ARMS:
        low, middle, high = statistics.quantiles(ratios(seconds, arm, "fp32"), n=4)
        rows.append(
            {
                "network": network,
                "arm": arm,
                "held_bytes": held[arm],
                "smaller": held["fp32"] / held[arm],
                "seconds": statistics.median(seconds[arm]),
                "ratio": middle,
                "ratio_low": low,
                "ratio_high": high,
            }
        )
    return rows


def train(epochs: int, seeds: int) -> dict[str, dict[str, float]]:
    """Return mean and standard deviation of the top-1 that each arm reaches on the digits, and its verdict."""
    comparison = compare(list(ARMS), seeds=range(seeds), recipe=Recipe(epochs=epochs))
    return {
        row.arm: {"top1": row.metric_mean, "sd": row.metric_sd, "verdict": str(row.quality)}  # type: ignore[dict-item]
        for row in comparison.arms
    }


@click.command(help=__doc__)
@click.option("--rounds", default=12, show_default=True, help="turns of every arm")
@click.option("--epochs", default=5, show_default=True, help="of the runs on the digits; 0 trains nothing")
@click.option("--seeds", default=3, show_default=True, help="of the runs on the digits")
@click.option(
    "--out", type=click.Path(path_type=Path), help="path of the .json and .md to write, without suffix"
)
def main(rounds: int, epochs: int, seeds: int, out: Path | None) -> None:
    torch.set_num_threads(1)
    rows = [row for network in NETWORKS for row in measure(network, rounds)]
    reached = train(epochs, seeds) if epochs else {}
    table = [
        [
            row["network"],
            row["arm"],
            f"{row['held_bytes'] / 1e6:.3f}",
            f"{row['smaller']:.1f}",
            f"{1000 * row['seconds']:.1f}",
            f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})",
        ]
        for row in rows
    ]
    headers = ["network", "arm", "saved MB", "times less", "ms a step", "time / fp32 (quartiles)"]
    machine = (
        f"torch {torch.__version__}, one thread, {torch.backends.cpu.get_cpu_capability()}, {rounds} rounds"
    )
    text = f"{make_table(table, headers)}"
    if reached:
        lines = [
            [
                arm,
                f"{100 * its['top1']:.2f}",
                f"{100 * (its['sd'] or 0):.2f}",
                its["verdict"] or "the reference",
            ]
            for arm, its in reached.items()
        ]
        text += f"\n\nTop-1 on the digits after {epochs} epochs, {seeds} seeds:\n\n"
        text += make_table(lines, ["arm", "top-1 %", "sd", "accuracy"])
    click.echo(text)
    if out is not None:
        data = {"rows": rows, "epochs": epochs, "seeds": seeds, "reached": reached}
        write_results(out, "Packed activations", __doc__, machine, text, data)


if __name__ == "__main__":
    main()
