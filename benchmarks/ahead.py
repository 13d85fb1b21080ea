"""Do the words of `diagnose --ahead` come true? Small networks, each trained to its end in fp32 and under each arm.

    python benchmarks/ahead.py [--trainings N]     # writes docs/benchmarks/ahead.json; half an hour on one core

An arm has failed if its mean training loss over the last tenth is more than 2 % above that of fp32, with the same first
weights and batches. The prefix is the first tenth. A training whose twin (weights changed by one part in 512) ends more
than 2 % away from it says nothing about arms: it is counted apart. How trainings end is kept in the file, so a second
call resumes; the words are made again in each call.
"""

import functools
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

import ampcompare
from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.laws import expected_outlook_of, loss_distance
from ampcompare.diagnosis.prefix import PrefixWatch
from ampcompare.tasks.lm import sentences
from ampcompare.training.twin import perturb_weights

HALF = ("half:bf16", "half", "half,state=fp32", "half,masters=fp32,loss_scale=1", "native:bf16,state=bf16")
OTHERS = ("half:bf16,masters=fp32", "half:bf16,kahan", "half:bf16,rounding=stochastic", "native:bf16")
STEPS = 300
PREFIX = STEPS // 10
BATCH = 16
FAILED = 0.02
OUT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "ahead.json"

Batch = tuple[Tensor, Tensor]


class Patches(nn.Module):
    """Self-attention over the rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.view(-1, 8, 8))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(1, 2) / 4).softmax(-1) @ v)
        return self.head(x.mean(1))


class Residual(nn.Module):
    """A residual block of convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, stride=2), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(54, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x.view(-1, 1, 8, 8)))
        return self.head((x + F.relu(self.norm(self.second(x)))).flatten(1))


class NextByte(nn.Module):
    """A window of embeddings and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(128, 8), nn.Linear(64, 48), nn.Linear(48, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.hidden(self.embed(x).flatten(1))))


class Student(nn.Module):
    """Learns a fixed random network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@functools.cache
def digits() -> Batch:
    found = load_digits()
    return torch.tensor(found.data / 16.0, dtype=torch.float32), torch.tensor(found.target)


@functools.cache
def text() -> Batch:
    letters = torch.tensor([*"\n".join(sentences(400)).encode()])
    windows = letters.unfold(0, 9, 1)
    return windows[:, :8].contiguous(), windows[:, 8].contiguous()


@functools.cache
def teacher() -> Batch:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2000, 12, generator=generator)
    w, v = torch.randn(12, 20, generator=generator), torch.randn(20, 3, generator=generator)
    return x, torch.tanh(x @ w / 3) @ v / 3


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], Callable[[Tensor, Tensor], Tensor]]] = {
    "attention on digits": (Patches, digits, F.cross_entropy),
    "residual convolutions on digits": (Residual, digits, F.cross_entropy),
    "next byte of a text": (NextByte, text, F.cross_entropy),
    "student of a network": (Student, teacher, F.mse_loss),
}
RATES = {"adamw": (3e-4, 1e-3, 5e-3), "sgd": (0.003, 0.03, 0.15)}


def warmup(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return a warm-up that is longer than the prefix, and a cosine behind it."""
    first = STEPS * 3 // 10
    parts: list[LRScheduler] = [
        LinearLR(optimizer, 0.01, 1.0, total_iters=first),
        CosineAnnealingLR(optimizer, T_max=STEPS - first),
    ]
    return SequentialLR(optimizer, parts, [first])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler | None]] = {
    "constant": lambda optimizer: None,
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=STEPS),
    "warm-up": warmup,
}


def train(
    training: tuple[str, str, float, str], arm: str, steps: int, *, watch: Any = None, is_twin: bool = False
) -> list[float]:
    """Return the losses of a training until one is not finite; a watch sees its steps."""
    task, name, rate, schedule = training
    make, data, loss_of = TASKS[task]
    torch.manual_seed(1)
    model = make()
    if is_twin:
        perturb_weights(model.parameters())
    x, y = data()
    precision = ampcompare.make_precision(arm, device="cpu")
    made: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=rate)
        if name == "adamw"
        else torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    )
    (model,), (made,) = precision.prepare([model], [made])
    scheduler = SCHEDULES[schedule](made)
    batches = torch.Generator().manual_seed(2)
    losses: list[float] = []
    while len(losses) < steps and all(map(math.isfinite, losses[-1:])):
        index = torch.randint(len(x), (BATCH,), generator=batches)
        with precision.autocast():
            loss = loss_of(model(x[index]).float(), y[index])
        if watch is not None:
            watch.see_loss(loss)
        precision.backward(loss, [made])
        precision.step(made)
        made.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def outcome(training: tuple[str, str, float, str]) -> dict[str, Any]:
    """Return how far the twin and each arm end from fp32, as a share of its loss."""

    def end(arm: str, *, is_twin: bool = False) -> float:
        losses = train(training, arm, STEPS, is_twin=is_twin)
        return statistics.fmean(losses[-STEPS // 10 :]) if len(losses) == STEPS else math.inf

    reference = end("fp32")
    return {
        "training": training,
        "twin": end("fp32", is_twin=True) / reference - 1,
        "arms": {arm: min(end(arm) / reference - 1, 1e9) for arm in (*HALF, *OTHERS)},
    }


def words(training: tuple[str, str, float, str]) -> dict[str, Any]:
    """Return what the first steps say of each arm."""
    watches = []
    for is_twin in (False, True):
        watch = PrefixWatch(PREFIX, total=STEPS)
        train(training, "fp32", PREFIX, watch=watch, is_twin=is_twin)
        watch.close()
        watches.append(watch.read_prefix())
    distance = loss_distance(watches[0].losses, watches[1].losses)
    found = {arm: expected_outlook_of(Arm.parse(arm), watches[0], distance).word for arm in (*HALF, *OTHERS)}
    return {
        "twin_of_prefix": distance,
        "words": found,
        "lost": {name: round(share.rest, 4) for name, share in watches[0].shares.items()},
    }


def main() -> None:
    torch.set_num_threads(1)
    count = int(sys.argv[sys.argv.index("--trainings") + 1]) if "--trainings" in sys.argv else None
    trainings = [
        (task, name, RATES[name][level], schedule)
        for task, name, level, schedule in itertools.product(TASKS, RATES, range(3), SCHEDULES)
    ]
    random.Random(0).shuffle(trainings)
    rows: list[dict[str, Any]] = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else []
    ended = {tuple(row["training"]) for row in rows}
    for training in trainings[:count]:
        if training not in ended:
            rows.append(outcome(training))
            OUT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(len(rows), *training, flush=True)
    rows = [row | words(tuple(row["training"])) for row in rows]
    OUT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for arms, calm in itertools.product((HALF, OTHERS), (True, False)):
        print(
            "16-bit weights, state or unscaled fp16" if arms is HALF else "other arms",
            "calm" if calm else "chaotic",
        )
        for word in ("will not hold", "no fault in sight", "cannot know"):
            gaps = [
                row["arms"][arm]
                for row in rows
                for arm in arms
                if row["words"][arm] == word and (abs(row["twin"]) <= FAILED) == calm
            ]
            print(f"  {word:18s} {len(gaps):4d} arms, {sum(gap > FAILED for gap in gaps)} failed")


if __name__ == "__main__":
    main()
