"""The diagnosis of a recipe, as plain data. Runs in a child process: O1 patches torch, and threads are set once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.diagnosis.diagnose import diagnose_given
from ampcompare.diagnosis.measure import Loop as AnyLoop
from ampcompare.diagnosis.options import DiagnoseOptions
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.examination import answering_errors
from ampcompare.runs.settings.validation import validate
from ampcompare.tasks.task import make_task
from ampcompare.training.assemble import Assembly, assemble_single
from ampcompare.training.build_loop import build_loop
from ampcompare.training.device import resolve_device
from ampcompare.training.precision.base import Precision

__all__ = ["diagnose_recipe", "recipe_loop"]


def recipe_loop(
    config: RunConfig,
    device: torch.device,
    *,
    is_twin: bool = False,
    show: Callable[[Assembly], None] = lambda assembly: None,
) -> AnyLoop:
    """Return the loop: it assembles the run of the recipe again at each call, and trains until it is stopped.

    Args:
        is_twin: change the weights by one part in 512.
        show: called with what is trained, before the first step.
    """
    recipe = config.recipe
    task = make_task(recipe)

    def train(precision: Precision) -> None:
        if config.parallel.kind == "fsdp":
            raise UnsupportedCombination(
                f"diagnose repeats operations on whole weights, but {config.arm} shards them; diagnose "
                "half:bf16,masters=fp32 or apex:O5, which compute in the same types"
            )
        assembly = assemble_single(recipe, task, precision, device, is_twin=is_twin)
        show(assembly)
        loop = build_loop(recipe, assembly, precision, drain_every=1)
        for epoch in range(recipe.epochs):
            batches = task.data.train_batches(epoch, recipe.batch_size, device=device)
            for _ in loop.run(batches, epoch=epoch):
                pass

    return train


@answering_errors
def diagnose_recipe(
    config: dict[str, Any],
    steps: int,
    at: list[int],
    reference: Literal["float32", "float64", "none"],
    cures: bool,
) -> dict[str, Any]:
    """Diagnose the arm and recipe of a configuration."""
    settings = validate(RunConfig, config)
    torch.set_num_threads(settings.threads)
    recipe = settings.recipe
    subject = f"{recipe.model.arch} on {recipe.data.name}, {recipe.optimizer.name}, seed {recipe.seed}"
    loop = recipe_loop(settings, resolve_device(settings.device))
    options = DiagnoseOptions(settings, steps=steps, at=tuple(at), reference=reference, cures=cures)
    return diagnose_given(loop, options, subject=subject).model_dump(mode="json")
