"""The first steps of a recipe in fp32, as plain data. Runs in a child process: threads are set once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import AmpCompareError
from ampcompare.diagnosis.measure import Conditions, Enough, trained_under
from ampcompare.diagnosis.prefix import PrefixWatch
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.validation import validated
from ampcompare.tasks.task import make_task
from ampcompare.training.assemble import assemble_single
from ampcompare.training.build_loop import build_loop
from ampcompare.training.device import resolve_device
from ampcompare.training.precision.base import Precision, PrecisionWrapper, StepOutcome

__all__ = ["prefix_recipe"]


class _Watched(PrecisionWrapper):
    """Passes losses on to a watch, and raises `Enough` at the end of the prefix."""

    def __init__(self, inner: Precision, watch: PrefixWatch) -> None:
        super().__init__(inner)
        self._watch = watch

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        self._watch.add_loss(loss)
        return self.inner.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        self._watch.add_loss(loss)
        self.inner.backward(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        outcome = self.inner.step(*optimizers)
        if self._watch.is_over:
            raise Enough
        return outcome


def prefix_recipe(config: dict[str, Any], steps: int, total: int | None, is_twin: bool) -> dict[str, Any]:
    """Train the first steps of a configuration in fp32, and return what was seen.

    Errors meant for users come back as `{"error": ..., "exit_code": ...}`.
    """
    try:
        settings = validated(RunConfig, {**config, "arm": "fp32"})
        torch.set_num_threads(settings.threads)
        device = resolve_device(settings.device)
        conditions = Conditions(device=str(device), seed=settings.recipe.seed)
        with trained_under(Arm.parse("fp32"), conditions) as precision, _watch(steps, total) as watch:
            with suppress(Enough):
                _train(settings, _Watched(precision, watch), watch, device, is_twin=is_twin)
        return watch.result().model_dump(mode="json")
    except AmpCompareError as error:
        return {"error": str(error), "exit_code": error.exit_code}


@contextmanager
def _watch(steps: int, total: int | None) -> Iterator[PrefixWatch]:
    watch = PrefixWatch(steps, total=total)
    try:
        yield watch
    finally:
        watch.close()


def _train(config: RunConfig, precision: Precision, watch: PrefixWatch, device: torch.device, *, is_twin: bool) -> None:
    recipe = config.recipe
    task = make_task(recipe)
    assembly = assemble_single(recipe, task, precision, device, is_twin=is_twin)
    watch.follow(assembly.schedule, watch.total or assembly.total_steps)
    loop = build_loop(recipe, assembly, precision, drain_every=1)
    for epoch in range(recipe.epochs):
        for _ in loop.run(task.data.train_batches(epoch, recipe.batch_size, device=device), epoch=epoch):
            pass
