"""A common mistake with torch.amp, in a typical loop: the optimizer steps twice.

`scaler.step(optimizer)` leaves out a step whose gradients overflowed; an `optimizer.step()` after it makes that step
anyway, with infinite gradients. Run as a program, this trains with and without the mistake, and prints a record
per run. The scale grows every `GROWTH_INTERVAL` steps, a hundredth of torch's default, so that an overflow occurs
within seconds and not after thousands of steps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ampcompare.runs.records.run import RunRecord, RunSummary, dump_json
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.recipe import DataConfig, ModelConfig, OptimizerConfig, Recipe, ScheduleConfig
from ampcompare.tasks.classification import classification_loss
from ampcompare.tasks.load import load_data
from ampcompare.tasks.models import build_model
from ampcompare.training.precision.cpu_half import cpu_half

__all__ = ["GROWTH_INTERVAL", "ROWS", "train"]

GROWTH_INTERVAL = 20
ROWS = {"step once": False, "step twice": True}
RECIPE = Recipe(
    data=DataConfig(name="digits", train_size=512),
    model=ModelConfig(arch="mlp", args={"width": 32}),
    optimizer=OptimizerConfig(lr=0.05, momentum=0.9, weight_decay=0.0),
    schedule=ScheduleConfig(name="constant", warmup_epochs=0),
    epochs=20,
    batch_size=32,
)


def train(seed: int, *, twice: bool) -> RunRecord:
    """Train as a script without this package would, and return whether its weights stayed finite.

    Args:
        twice: call `optimizer.step()` once more after `scaler.step(optimizer)`.
    """
    recipe = RECIPE.model_copy(update={"seed": seed})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = load_data(recipe.data.name, seed=seed, train_size=recipe.data.train_size)
    torch.manual_seed(seed)
    model = build_model(
        recipe.model.arch, num_classes=10, sample_shape=data.sample_shape, model_args=recipe.model.args
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.optimizer.lr, momentum=recipe.optimizer.momentum)
    scaler = torch.amp.GradScaler(device.type, growth_interval=GROWTH_INTERVAL)
    how, arithmetic = cpu_half("auto", torch.float16, device)
    steps, diverged = 0, None
    with arithmetic:
        for epoch in range(recipe.epochs):
            for samples, labels in data.train_batches(epoch, recipe.batch_size, device=device):
                with torch.autocast(device.type, dtype=torch.float16):
                    loss = classification_loss(model(samples), labels)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                if twice:
                    optimizer.step()  # the mistake
                scaler.update()
                optimizer.zero_grad()
                if diverged is None and not all(bool(param.isfinite().all()) for param in model.parameters()):
                    diverged = steps
                steps += 1
    correct = sum(
        int((model(samples).argmax(1) == labels).sum()) for samples, labels in data.val_batches(64, device=device)
    )
    return _record(recipe, "step twice" if twice else "step once", how, steps, diverged, correct, data.num_val, scaler)


def _record(
    recipe: Recipe, row: str, how: str | None, steps: int, diverged: int | None, correct: int, samples: int,
    scaler: torch.amp.GradScaler,
) -> RunRecord:  # fmt: skip
    config = RunConfig(recipe=recipe, arm=f"native:fp16,growth_interval={GROWTH_INTERVAL}")
    return RunRecord(
        cell=config.digest(),
        arm=row,
        status="completed" if diverged is None else "diverged",
        config=config,
        half=how,
        summary=RunSummary(
            metric_final=correct / samples if diverged is None else None,
            num_steps=steps,
            final_loss_scale=scaler.get_scale(),
            diverged_step=diverged,
            divergence=None if diverged is None else "non-finite weights",
        ),
    )


def records(seeds: Sequence[int]) -> str:
    """Return a line of JSON for each row and seed."""
    found = [train(seed, twice=twice) for seed in seeds for twice in ROWS.values()]
    return "".join(dump_json(record, indent=None) + "\n" for record in found)


if __name__ == "__main__":
    sys.stdout.write(records([int(text) for text in sys.argv[1:]]))
