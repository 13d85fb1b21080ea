"""The diagnosis of a recipe, as plain data. Runs in a child process: O1 patches torch, and threads are set once."""

from __future__ import annotations

from typing import Any

import torch

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.diagnose import diagnose_loop
from ampcompare.diagnosis.measure import Conditions
from ampcompare.diagnosis.recipe_loop import recipe_loop
from ampcompare.errors import AmpCompareError
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import validated
from ampcompare.training.device import resolve_device

__all__ = ["diagnose_recipe"]


def diagnose_recipe(
    config: dict[str, Any], steps: int, at: list[int] | None, reference: str | None, cures: bool
) -> dict[str, Any]:
    """Diagnose the arm and recipe of a configuration.

    Errors meant for users come back as `{"error": ..., "exit_code": ...}`.
    """
    try:
        settings = validated(RunConfig, config)
        torch.set_num_threads(settings.threads)
        device = resolve_device(settings.device)
        conditions = Conditions(
            steps=steps,
            at=at,
            reference=None if reference is None else getattr(torch, reference),
            device=str(device),
            half=settings.cpu_half,
            seed=settings.recipe.seed,
        )
        recipe = settings.recipe
        subject = f"{recipe.model.arch} on {recipe.data.name}, {recipe.optimizer.name}, seed {recipe.seed}"
        found = diagnose_loop(
            recipe_loop(settings, device), Arm.parse(settings.arm), conditions, subject=subject, cures=cures
        )
        return found.model_dump(mode="json")
    except AmpCompareError as error:
        return {"error": str(error), "exit_code": error.exit_code}
