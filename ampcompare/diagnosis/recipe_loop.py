"""The training loop of a recipe as `diagnose_loop` takes it: from a precision alone."""

from __future__ import annotations

import torch

from ampcompare.diagnosis.measure import Loop as AnyLoop
from ampcompare.precision.base import Precision
from ampcompare.settings.config import RunConfig
from ampcompare.training.assemble import assemble_single, make_task
from ampcompare.training.loop import Loop
from ampcompare.training.metrics.clock import make_clock

__all__ = ["recipe_loop"]


def recipe_loop(config: RunConfig, device: torch.device) -> AnyLoop:
    """Return the loop: it assembles the run of the recipe again at each call, and trains until it is stopped."""
    recipe = config.recipe
    task = make_task(recipe)

    def train(precision: Precision) -> None:
        assembly = assemble_single(recipe, task, precision, device)
        loop = Loop(
            models=assembly.models,
            optimizers=assembly.optimizers,
            precision=precision,
            parallel=assembly.parallel,
            loss_of=task.loss,
            clock=make_clock(device),
            accumulation=recipe.grad_accum_steps,
            clip_norm=recipe.clip_grad,
            schedule=assembly.schedule,
            base_lrs=assembly.base_lrs,
            drain_every=1,
            channels_last=recipe.channels_last,
        )
        for epoch in range(recipe.epochs):
            batches = task.data.train_batches(epoch, recipe.batch_size, device=device)
            for _ in loop.run(batches, epoch=epoch):
                pass

    return train
