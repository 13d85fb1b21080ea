"""Train a few steps from a checkpoint of any program. Runs in a child process: O1 patches torch permanently."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ampcompare.settings.config import RunConfig
from ampcompare.settings.examination import answering_errors
from ampcompare.settings.validation import validate
from ampcompare.tasks.task import make_task
from ampcompare.training.assemble import assemble
from ampcompare.training.build_loop import build_loop
from ampcompare.training.checkpoint.convert.load import load_ours
from ampcompare.training.device import resolve_device
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import cpu_half
from ampcompare.training.process_group import own_group

__all__ = ["continue_checkpoint"]


@answering_errors
def continue_checkpoint(config: dict[str, Any], checkpoint: str, steps: int) -> dict[str, Any]:
    """Train from a checkpoint on the first batches of the recipe, at the learning rates that it contains.

    Returns:
        Losses, loss scales after each step (empty if nothing is scaled) and skipped steps.
    """
    settings = validate(RunConfig, config)
    with own_group(settings):
        return _continue(settings, Path(checkpoint), steps)


def _continue(config: RunConfig, checkpoint: Path, steps: int) -> dict[str, Any]:
    torch.set_num_threads(config.threads)
    recipe, device = config.recipe, resolve_device(config.device)
    state = load_ours(checkpoint)
    precision = make_precision(config.arm, device=str(device))
    task = make_task(recipe)
    assembly = assemble(recipe, task, precision, device, state=state)
    fp16_mode, context = cpu_half(config.cpu_half, precision.half_dtype, device)

    def batches() -> Iterator[Any]:
        for epoch in count():
            yield from task.data.train_batches(epoch, recipe.batch_size, device=device)

    loop = build_loop(recipe, assembly, precision, drain_every=1)
    loop.schedule = None
    with context:
        scales_before = list(precision.loss_scales())
        records = [record for block in loop.run(batches(), epoch=0, steps=steps) for record in block]
    return {
        "arm": config.arm,
        "half": fp16_mode,
        "scales_before": scales_before,
        "losses": [repr(record.loss) for record in records],
        "scales": [list(record.loss_scales) for record in records],
        "skipped": sum(not all(record.applied) for record in records),
    }
