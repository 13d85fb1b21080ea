"""Do the words of `diagnose --ahead` come true? Small networks, each trained to its end in fp32 and under each arm.

    python benchmarks/ahead.py [--quick]     # writes docs/benchmarks/ahead.json

An arm has failed if its mean training loss over the last tenth is more than 2 % above that of fp32, with the same first
weights and batches. The prefix is the first tenth. A training whose twin (weights changed by one part in 512) ends more
than 2 % away from it says nothing about arms: it is counted apart.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import ampcompare
from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.laws import outlook_of, twin_distance
from ampcompare.diagnosis.prefix import PrefixWatch
from ampcompare.tasks.lm import sentences
from ampcompare.training.twin import change_weights

ARMS = ("half:bf16", "half:bf16,masters=fp32", "half:bf16,kahan", "half:bf16,rounding=stochastic", "native:bf16")
STEPS = 500
PREFIX = STEPS // 10
FAILED = 0.02
OUT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "ahead.json"

Batch = tuple[Tensor, Tensor]


class Patches(nn.Module):
    """Self-attention over the rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(8, 32), nn.LayerNorm(32)
        self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.view(-1, 8, 8))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return self.head(x.mean(1))


class Residual(nn.Module):
    """Two residual blocks with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(-1, 1, 8, 8))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class NextByte(nn.Module):
    """A window of embeddings and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(128, 16), nn.Linear(128, 64), nn.Linear(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.hidden(self.embed(x).flatten(1))))


class Teacher(nn.Module):
    """A student of a fixed random network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def digits() -> Batch:
    found = load_digits()
    return torch.tensor(found.data / 16.0, dtype=torch.float32), torch.tensor(found.target)


def text() -> Batch:
    letters = torch.tensor([*"\n".join(sentences(400)).encode()])
    windows = letters.unfold(0, 9, 1)
    return windows[:, :8].contiguous(), windows[:, 8].contiguous()


def taught() -> Batch:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2000, 12, generator=generator)
    w, v = torch.randn(12, 20, generator=generator), torch.randn(20, 3, generator=generator)
    return x, torch.tanh(x @ w / 3) @ v / 3


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], Callable[[Tensor, Tensor], Tensor]]] = {
    "attention on digits": (Patches, digits, F.cross_entropy),
    "residual convolutions on digits": (Residual, digits, F.cross_entropy),
    "next byte of a text": (NextByte, text, F.cross_entropy),
    "student of a network": (Teacher, taught, F.mse_loss),
}
RATES = {"adamw": (3e-4, 1e-3, 5e-3), "sgd": (0.003, 0.03, 0.15)}


def train(
    task: str,
    optimizer: str,
    rate: float,
    schedule: str,
    arm: str,
    *,
    steps: int,
    watch: Any = None,
    is_twin: bool = False,
) -> list[float]:
    """Return the losses of a training; a watch sees its first steps."""
    make, data, loss_of = TASKS[task]
    torch.manual_seed(1)
    model = make()
    if is_twin:
        change_weights(model.parameters())
    x, y = data()
    precision = ampcompare.make_precision(arm, device="cpu")
    made: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=rate)
        if optimizer == "adamw"
        else torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    )
    (model,), (made,) = precision.prepare([model], [made])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=STEPS) if schedule == "cosine" else None
    batches = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        index = torch.randint(len(x), (32,), generator=batches)
        with precision.autocast():
            loss = loss_of(model(x[index]).float(), y[index])
        if watch is not None:
            watch.add_loss(loss)
        precision.backward(loss, [made])
        precision.step(made)
        made.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def tail(losses: list[float]) -> float:
    return statistics.fmean(losses[-STEPS // 10 :])


def rows(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each arm on each training."""
    cases = itertools.product(TASKS, RATES, range(3), ("cosine", "constant"))
    for task, optimizer, level, schedule in itertools.islice(cases, 4 if quick else None):
        rate = RATES[optimizer][level]
        given = (task, optimizer, rate, schedule)
        watches = []
        curves = []
        for is_twin in (False, True):
            watch = PrefixWatch(PREFIX, total=STEPS)
            curves.append(train(*given, "fp32", steps=STEPS, watch=watch, is_twin=is_twin))
            watch.close()
            watches.append(watch)
        prefix = watches[0].result()
        distance = twin_distance(curves[0][:PREFIX], curves[1][:PREFIX])
        reference = tail(curves[0])
        chaos = abs(tail(curves[1]) / reference - 1)
        for arm in ARMS:
            outlook = outlook_of(Arm.parse(arm), prefix, distance)
            end = tail(train(*given, arm, steps=STEPS))
            gap = end / reference - 1 if math.isfinite(end) else math.inf
            yield {
                **dict(zip(("task", "optimizer", "rate", "schedule"), given, strict=True)),
                "arm": arm,
                "word": outlook.word,
                "share": outlook.share_rest,
                "gap": gap,
                "twin_end": chaos,
            }


def main() -> None:
    torch.set_num_threads(1)
    found = []
    for row in rows(quick="--quick" in sys.argv):
        found.append(row)
        print(json.dumps(row), flush=True)
    for calm in (True, False):
        print("calm" if calm else "all")
        for word in ("will not hold", "no fault in sight", "cannot know"):
            those = [row for row in found if row["word"] == word and (not calm or row["twin_end"] <= FAILED)]
            failed = sum(row["gap"] > FAILED for row in those)
            print(f"  {word:18s} {len(those):4d} arms, {failed} failed")
    if "--quick" not in sys.argv:
        OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
