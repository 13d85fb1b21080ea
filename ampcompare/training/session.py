"""A whole run: epochs of the loop with an evaluation after each, stopped early when it has diverged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from ampcompare.config import RunConfig
from ampcompare.parallel.ranks import require_equal, weights_digest
from ampcompare.precision.base import Precision
from ampcompare.record import EpochResult, StepRecord
from ampcompare.training.assemble import Assembly
from ampcompare.training.divergence import DivergenceWatch
from ampcompare.training.evaluate import Evaluation, evaluate
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
        ranks = assembly.ranks
        self.watch = DivergenceWatch(config.nan_patience, ranks.any)
        self._skipped = 0
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
            mean=ranks.mean if ranks.size > 1 else None,
            after_step=() if assembly.average is None else (assembly.average.update,),
        )

    @property
    def precision(self) -> Precision:
        """The backend that trains."""
        return self.assembly.precision

    def events(self) -> Iterator[list[StepRecord] | EpochResult]:
        """Train; yield each drained block of steps, and the result of each epoch."""
        assembly, recipe, ranks = self.assembly, self.config.recipe, self.assembly.ranks
        share: dict[str, Any] = {"rank": ranks.rank, "world_size": ranks.size, "workers": assembly.workers}
        for epoch in range(recipe.epochs):
            left = assembly.total_steps - self.loop.step
            if left <= 0:
                return
            begin = self._now()
            batches = assembly.task.data.train_batches(epoch, recipe.batch_size, device=assembly.device, **share)
            for records in self.loop.run(batches, epoch=epoch, steps=left):
                diverged = self.watch.look(records, assembly.replicas)
                self._skipped += sum(not all(record.applied) for record in records)
                yield records
                if diverged and self.config.on_nan == "stop":
                    return
            trained = self._now()
            if ranks.size > 1:
                self._see_that_ranks_agree(epoch)
            result = self._evaluate(share)
            averaged = self._evaluate_average(share)
            yield EpochResult(
                epoch=epoch,
                samples=result.samples,
                top1_correct=result.top1_correct,
                top5_correct=result.top5_correct,
                loss=result.loss,
                ema_top1_correct=None if averaged is None else averaged.top1_correct,
                ema_top5_correct=None if averaged is None else averaged.top5_correct,
                ema_loss=None if averaged is None else averaged.loss,
                train_seconds=trained - begin,
                eval_seconds=self._now() - trained,
            )

    def _evaluate(self, share: dict[str, Any]) -> Evaluation:
        assembly, ranks = self.assembly, self.assembly.ranks
        return evaluate(
            assembly.replicas,
            assembly.precision,
            assembly.task.data.val_batches(self.config.recipe.batch_size, device=assembly.device, **share),
            assembly.device,
            ranks.total if ranks.size > 1 else None,
        )

    def _evaluate_average(self, share: dict[str, Any]) -> Evaluation | None:
        average, ranks = self.assembly.average, self.assembly.ranks
        if average is None:
            return None
        if ranks.size > 1:
            average.equalize_buffers(ranks)
        with average.applied(self.precision):
            return self._evaluate(share)

    def _see_that_ranks_agree(self, epoch: int) -> None:
        """Compare weights, loss scales and skipped steps; buffers follow rank 0, whose statistics are evaluated.

        Raises:
            RanksDiffer: naming the ranks and what differs.
        """
        self.assembly.ranks.equalize_buffers(self.assembly.replicas)
        if self.watch.diverged_step is not None:  # a NaN is not one pattern of bits
            return
        state = {
            "loss scales": self.precision.loss_scales(),
            "number of skipped steps": self._skipped,
            "hash of weights": weights_digest(self.assembly.replicas),
        }
        remedy = f"seen at the end of epoch {epoch}; every rank must apply the same gradients"
        require_equal(self.assembly.ranks, "state of training", state, remedy)

    def _now(self) -> float:
        """Return the wall time once the device has caught up; between epochs, never inside a timed step."""
        if self.assembly.device.type == "cuda":
            torch.cuda.synchronize(self.assembly.device)
        return time.perf_counter()
