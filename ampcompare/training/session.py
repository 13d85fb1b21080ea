"""A whole run: epochs of the loop with an evaluation after each, stopped early when it has diverged."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from ampcompare.config import RunConfig
from ampcompare.precision.base import Precision
from ampcompare.record import EpochResult, StepRecord
from ampcompare.training.assemble import Assembly
from ampcompare.training.divergence import DivergenceWatch
from ampcompare.training.evaluate import evaluate
from ampcompare.training.loop import Loop
from ampcompare.training.measure import make_clock

__all__ = ["Session"]


class Session:
    """Trains an assembly as a configuration says. Iterating `events` is all there is to do.

    Attributes:
        watch: what has been seen of divergence.
    """

    def __init__(self, config: RunConfig, assembly: Assembly) -> None:
        self.config = config
        self.assembly = assembly
        self.watch = DivergenceWatch(config.nan_patience)
        recipe = config.recipe
        self.loop = Loop(
            models=assembly.models,
            optimizers=assembly.optimizers,
            precision=assembly.precision,
            parallel=assembly.parallel,
            loss_of=assembly.task.loss,  # type: ignore[arg-type]
            clock=make_clock(assembly.device),
            accumulation=recipe.grad_accum_steps,
            clip_norm=recipe.clip_grad,
            schedule=assembly.schedule,
            base_lrs=assembly.base_lrs,
            drain_every=config.drain_every,
            channels_last=recipe.channels_last,
        )

    @property
    def precision(self) -> Precision:
        """The backend that trains."""
        return self.assembly.precision

    def events(self) -> Iterator[list[StepRecord] | EpochResult]:
        """Train; yield each drained block of steps, and the result of each epoch."""
        assembly, recipe = self.assembly, self.config.recipe
        for epoch in range(recipe.epochs):
            left = assembly.total_steps - self.loop.step
            if left <= 0:
                return
            begin = self._now()
            batches = assembly.task.data.train_batches(
                epoch, recipe.batch_size, device=assembly.device, workers=assembly.workers
            )
            for records in self.loop.run(batches, epoch=epoch, steps=left):
                diverged = self.watch.look(records, assembly.models)
                yield records
                if diverged and self.config.on_nan == "stop":
                    return
            trained = self._now()
            result = evaluate(
                assembly.models,
                assembly.precision,
                assembly.task.data.val_batches(recipe.batch_size, device=assembly.device, workers=assembly.workers),
                assembly.device,
            )
            yield EpochResult(
                epoch=epoch,
                samples=result.samples,
                top1_correct=result.top1_correct,
                top5_correct=result.top5_correct,
                loss=result.loss,
                train_seconds=trained - begin,
                eval_seconds=self._now() - trained,
            )

    def _now(self) -> float:
        """Return the wall time once the device has caught up; between epochs, never inside a timed step."""
        if self.assembly.device.type == "cuda":
            torch.cuda.synchronize(self.assembly.device)
        return time.perf_counter()
