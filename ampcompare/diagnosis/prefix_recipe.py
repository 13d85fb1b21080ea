"""The first steps of a recipe in fp32, as plain data. Runs in a child process: threads are set once."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.loops import Conditions, Enough, recipe_loop, trained_under
from ampcompare.diagnosis.prefix import PrefixWatch
from ampcompare.settings.config import RunConfig
from ampcompare.settings.examination import answering_errors
from ampcompare.settings.validation import validate
from ampcompare.training.assemble import Assembly
from ampcompare.training.device import resolve_device
from ampcompare.training.precision.base import Precision, PrecisionWrapper, StepOutcome

__all__ = ["prefix_recipe"]


class _Watched(PrecisionWrapper):
    """Passes losses on to a watch, and raises `Enough` at the end of the prefix."""

    def __init__(self, inner: Precision, watch: PrefixWatch) -> None:
        super().__init__(inner)
        self._watch = watch

    def see_loss(self, loss: Tensor, loss_id: int) -> None:
        self._watch.add_loss(loss)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        outcome = self.inner.step(*optimizers)
        if self._watch.is_over:
            raise Enough
        return outcome


@answering_errors
def prefix_recipe(config: dict[str, Any], steps: int, total: int | None, is_twin: bool) -> dict[str, Any]:
    """Train the first steps of a configuration in fp32, and return what was seen."""
    settings = validate(RunConfig, {**config, "arm": "fp32"})
    torch.set_num_threads(settings.threads)
    device = resolve_device(settings.device)
    conditions = Conditions(device=str(device), seed=settings.recipe.seed)
    with (
        trained_under(Arm.parse("fp32"), conditions) as precision,
        closing(PrefixWatch(steps, total=total)) as watch,
    ):

        def show(assembly: Assembly) -> None:
            watch.follow(assembly.schedule, total or assembly.total_steps)

        with suppress(Enough):
            recipe_loop(settings, device, is_twin=is_twin, show=show)(_Watched(precision, watch))
    return watch.result().model_dump(mode="json")
