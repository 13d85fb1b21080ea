"""A whole run: epochs of the loop with an evaluation after each, until it is over, has diverged, or is told to end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ampcompare.config import RunConfig
from ampcompare.parallel.ranks import require_equal, weights_digest
from ampcompare.precision.base import Precision
from ampcompare.record import EpochResult, Resumption, StepRecord
from ampcompare.training.assemble import Assembly
from ampcompare.training.checkpoint import Stateful
from ampcompare.training.divergence import DivergenceWatch
from ampcompare.training.evaluate import Evaluation, evaluate
from ampcompare.training.limits import EarlyStop, ScaleLimits
from ampcompare.training.loop import Loop
from ampcompare.training.measure import make_clock
from ampcompare.training.nonfinite import SkipNonFinite
from ampcompare.training.prefetch import CudaLane, ahead
from ampcompare.training.rollback import Rollback
from ampcompare.training.saving import Saver
from ampcompare.training.stopping import StopRequest
from ampcompare.training.views import make_views

__all__ = ["Position", "Session"]


@dataclass
class Position:
    """Where a run stands at a drain point.

    Attributes:
        step: updates made.
        epoch: epochs that are over, their evaluation with them.
        batch: updates made in the present epoch.
        train_seconds: spent on them.
        skipped: updates that were skipped, over all optimizers.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    train_seconds: float = 0.0
    skipped: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.step, self.epoch, self.batch = int(state["step"]), int(state["epoch"]), int(state["batch"])
        self.train_seconds, self.skipped = float(state["train_seconds"]), int(state["skipped"])


class Session:
    """Trains an assembly as a configuration says. Iterating `events` is all there is to do.

    Args:
        saver: writes checkpoints where they are due.
        stop: asks for the end of the run.

    Attributes:
        watch: what has been seen of divergence.
        parts: all that has a state of its own and is saved under its name; whoever consumes the events may add to it.
        position: how far the run is.
        best: value and step of the best evaluation.
        resumed: checkpoints that the run went on from.
        early_stop, rollback: where the configuration asks for them.
        interrupted: whether the run was told to end before it was over.
    """

    def __init__(
        self, config: RunConfig, assembly: Assembly, *, saver: Saver | None = None, stop: StopRequest | None = None
    ) -> None:
        self.config = config
        self.assembly = assembly
        ranks = assembly.ranks
        self.watch = DivergenceWatch(config.nan_patience, ranks.any)
        self.parts: dict[str, Stateful] = {"watch": self.watch}
        if assembly.average is not None:
            self.parts["average"] = assembly.average
        self.position = Position()
        self.best: dict[str, Any] = {"value": None, "step": None}
        self.resumed: list[Resumption] = []
        self.interrupted = False
        self._saver = saver
        self._stop = stop
        parts = (assembly.replicas, assembly.optimizers, assembly.precision)
        self.early_stop: EarlyStop | None = None
        if config.recipe.early_stop is not None or config.recipe.target_top1 is not None:
            self.early_stop = EarlyStop(config.recipe.early_stop, config.recipe.target_top1)
            self.parts["early_stop"] = self.early_stop
        self._limits: ScaleLimits | None = None
        if config.stop_loss_scale is not None or config.max_skipped is not None:
            self._limits = ScaleLimits(config.stop_loss_scale, config.max_skipped)
            self.parts["limits"] = self._limits
        self.rollback: Rollback | None = None
        if config.on_nan == "rollback":
            every, most = config.rollback_every, config.max_rollbacks
            self.rollback = Rollback(*parts, assembly.average, every=every, most=most)
            self.parts["rollback"] = self.rollback
        self._views = make_views(config.recipe.tta, assembly.task.data.sample_shape)
        skips = config.on_nan == "skip"
        recipe = config.recipe
        self.loop = Loop(
            models=assembly.models,
            optimizers=assembly.optimizers,
            precision=SkipNonFinite(assembly.precision, assembly.replicas, ranks.any) if skips else assembly.precision,
            parallel=assembly.parallel,
            loss_of=assembly.task.loss,
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
        """Train from where the run stands; yield each drained block of steps, and the result of each epoch.

        Saving is done once the consumer asks for the next event: it has then seen all that a checkpoint holds.
        """
        assembly, recipe, ranks, position = self.assembly, self.config.recipe, self.assembly.ranks, self.position
        share: dict[str, Any] = {"rank": ranks.rank, "world_size": ranks.size, "workers": assembly.workers}
        share["pin_memory"] = self.config.pin_memory
        if self.rollback is not None:
            self.rollback.keep(position.step)
        for epoch in range(position.epoch, recipe.epochs):
            left = assembly.total_steps - position.step
            if (left <= 0 and position.batch == 0) or self.ended:
                break
            begin = self._now() - position.train_seconds
            batches: Iterator[tuple[torch.Tensor, ...]] = assembly.task.data.train_batches(
                epoch, recipe.batch_size, device=assembly.device, start=position.batch, **share
            )
            if self.config.prefetch and assembly.device.type == "cuda":
                batches = ahead(batches, self.config.prefetch, CudaLane(assembly.device))
            for records in self.loop.run(batches, epoch=epoch, steps=left):
                diverged = self.watch.look(records, assembly.replicas)
                position.skipped += sum(not all(record.applied) for record in records)
                position.step, position.batch = self.loop.step, position.batch + len(records)
                yield records
                if self._is_lost(records, diverged):
                    return
                if self._stops_after(len(records), begin):
                    return
            trained = self._now()
            if ranks.size > 1:
                self._see_that_ranks_agree(epoch)
            result = self._evaluate(share)
            averaged = self._evaluate_average(share)
            position.epoch, position.batch, position.train_seconds = epoch + 1, 0, 0.0
            event = EpochResult(
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
            yield event
            if self.early_stop is not None:
                self.early_stop.look(event)
            if self._saver is not None:
                self._save_epoch(self._saver, result)
        if self._saver is not None and self._saver.is_on:
            self._saver.save(self, last=True)

    @property
    def ended(self) -> str | None:
        """Why training ended before its last epoch, in a good state; None where it did not."""
        return None if self.early_stop is None else self.early_stop.reason

    def _is_lost(self, records: Sequence[StepRecord], diverged: bool) -> bool:
        """Do after a block of steps what the run's policies say; return whether it ends here as diverged.

        All that is asked for here is equal on all ranks, which go back or end together.
        """
        limit = None if self._limits is None else self._limits.look(records)
        if limit is not None:
            self.watch.end(*limit)
            return True
        if not diverged:
            if self.rollback is not None and math.isfinite(records[-1].loss):
                self.rollback.keep(self.position.step)
            return False
        if self.rollback is not None and self.rollback.go_back(self.position.step):
            self.watch.recover()
            self.loop.reload_scales()
            return False
        return self.config.on_nan != "continue"

    def _stops_after(self, count: int, begin: float) -> bool:
        """Save after a block of `count` steps where it is due; tell whether the run ends here because it was told to.

        Ranks stop together, whichever of them was told.
        """
        ranks, position, stop = self.assembly.ranks, self.position, self._stop
        before = position.step - count
        if stop is not None:
            asked = stop.holds(before, position.step)
            self.interrupted = ranks.any(asked) if ranks.size > 1 else asked
        if self._saver is not None and (self.interrupted or self._saver.is_due(before, position.step)):
            position.train_seconds = self._now() - begin
            self._saver.save(self, last=self.interrupted)
        return self.interrupted

    def _save_epoch(self, saver: Saver, result: Evaluation) -> None:
        """Save after an evaluation where it is due, and where it is the best so far."""
        value = result.top1_correct / result.samples
        improved = self.best["value"] is None or value > self.best["value"]
        if improved:
            self.best = {"value": value, "step": self.position.step}
        if saver.is_due_after(self.position.epoch) or (saver.is_on and improved):
            saver.save(self, best=improved)

    def _evaluate(self, share: dict[str, Any]) -> Evaluation:
        assembly, ranks = self.assembly, self.assembly.ranks
        result = evaluate(
            assembly.replicas,
            assembly.precision,
            assembly.task.data.val_batches(self.config.recipe.batch_size, device=assembly.device, **share),
            assembly.device,
            ranks.total if ranks.size > 1 else None,
            self._views,
        )
        self.precision.weights_replaced()  # casts of an evaluation carry no gradient, and training makes its own
        return result

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
            "number of skipped steps": self.position.skipped,
            "hash of weights": weights_digest(self.assembly.replicas),
        }
        remedy = f"seen at the end of epoch {epoch}; every rank must apply the same gradients"
        require_equal(self.assembly.ranks, "state of training", state, remedy)

    def _now(self) -> float:
        """Return the wall time once the device has caught up; between epochs, never inside a timed step."""
        if self.assembly.device.type == "cuda":
            torch.cuda.synchronize(self.assembly.device)
        return time.perf_counter()
