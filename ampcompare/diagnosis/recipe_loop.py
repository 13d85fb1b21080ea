"""The training loop of a recipe as `diagnose_loop` takes it: from a precision alone."""

from __future__ import annotations

import torch

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.diagnosis.measure import Loop as AnyLoop
from ampcompare.precision.base import Precision
from ampcompare.settings.config import RunConfig
from ampcompare.tasks.registry import make_task
from ampcompare.training.assemble import assemble_single
from ampcompare.training.build_loop import build_loop

__all__ = ["recipe_loop"]


def recipe_loop(config: RunConfig, device: torch.device) -> AnyLoop:
    """Return the loop: it assembles the run of the recipe again at each call, and trains until it is stopped."""
    recipe = config.recipe
    task = make_task(recipe)

    def train(precision: Precision) -> None:
        if config.parallel.kind == "fsdp":
            raise UnsupportedCombination(
                f"diagnose repeats operations on whole weights, but {config.arm} shards them; diagnose "
                "half:bf16,masters=fp32 or apex:O5, which compute in the same types"
            )
        assembly = assemble_single(recipe, task, precision, device)
        loop = build_loop(recipe, assembly, precision, drain_every=1)
        for epoch in range(recipe.epochs):
            batches = task.data.train_batches(epoch, recipe.batch_size, device=device)
            for _ in loop.run(batches, epoch=epoch):
                pass

    return train
