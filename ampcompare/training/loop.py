"""The training step, the same for every backend, and the loop that repeats it without waiting for the device."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from ampcompare.base.tensors.sharded import gather_whole
from ampcompare.results.records.step import StepRecord
from ampcompare.tasks.data import split_batch as split_batch
from ampcompare.tasks.data import to_channels_last as to_channels_last
from ampcompare.tasks.task import LossOf
from ampcompare.training.meters import Clock
from ampcompare.training.parallel.ranks import Communicator
from ampcompare.training.parallel.replication import Parallel, SingleProcess
from ampcompare.training.precision.base import Precision, StepOutcome

# Steps with and without all-reduce, timed in pairs.
MIN_PAIRS, MAX_PAIRS = 3, 10
PAIRS_SECONDS = 4.0


def update(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    precision: Precision,
    parallel: Parallel,
    loss_of: LossOf,
    microbatches: Sequence[Any],
    clip_norm: float | None = None,
    loss_id: int = 0,
) -> tuple[list[Tensor], Tensor | None, StepOutcome]:
    """Make one update of the weights from one or more micro-batches, with gradients clipped for each optimizer.

    Returns the losses divided by the number of micro-batches (detached, still on the device), the largest gradient norm
    before clipping (None without clipping), and the outcome of the step.
    """
    *early, last = microbatches
    count = len(microbatches)
    losses = []
    for batch in early:
        with parallel.no_sync(models):
            with precision.autocast():
                loss = loss_of(models, batch) / count
            precision.backward(loss, optimizers, loss_id=loss_id, delay_unscale=True)
        losses.append(loss.detach())
    with precision.autocast():
        loss = loss_of(models, last)
        if early:
            loss = loss / count
    precision.backward(loss, optimizers, loss_id=loss_id)
    losses.append(loss.detach())
    norm = None
    if clip_norm is not None:
        # Looked up on the module at each call, so that guards can replace it.
        norms = [
            clip_grad.clip_grad_norm_(precision.unscale(optimizer), clip_norm) for optimizer in optimizers
        ]
        norm = norms[0] if len(norms) == 1 else torch.stack(norms).amax()
    outcome = precision.step(*optimizers)
    for optimizer in optimizers:
        optimizer.zero_grad()  # no arguments: Apex's replacement under O2 takes none
    return losses, norm, outcome


@dataclass
class Loop:
    """Repeats `update` over batches and yields records, a block of steps at a time.

    Losses, norms and outcomes stay on the device until `drain_every` of them are read together.
    """

    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    precision: Precision
    parallel: Parallel
    loss_of: LossOf
    clock: Clock
    num_losses: int = 1  # that `update` returns for each micro-batch; those of one loss come together
    accumulation: int = 1  # micro-batches per batch
    clip_norm: float | None = None
    schedule: Callable[[int], float] | None = None  # factor on the learning rates by step
    base_lrs: Sequence[Sequence[float]] = ()  # per optimizer and group, what it multiplies
    drain_every: int = 20
    channels_last: bool = False
    mean: Callable[[Tensor], Tensor] | None = None  # averages losses over all ranks; None for one process
    after_step: Sequence[Callable[[], None]] = ()  # called in order; their time counts as part of the step
    split: Callable[[Any, int], Sequence[Any]] = split_batch  # cuts a batch into micro-batches of equal size
    to_channels_last: Callable[[Any], Any] = to_channels_last
    # itself, or a CUDA graph of it
    update: Callable[..., tuple[list[Tensor], Tensor | None, StepOutcome]] = update
    step: int = 0  # updates made so far
    _scales: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._scales = self.precision.loss_scales()

    def run(
        self, batches: Iterable[Any], *, epoch: int, steps: int | None = None
    ) -> Iterator[list[StepRecord]]:
        """Train on `batches`, at most `steps` of them, yielding blocks of at most `drain_every` records."""
        pending: list[tuple[Any, ...]] = []
        models = self.models
        optimizers = self.optimizers
        precision = self.precision
        parallel = self.parallel
        loss_of = self.loss_of
        clip_norm = self.clip_norm
        after_step = self.after_step
        splits = self.accumulation > 1 or self.channels_last
        mark = self.clock.mark
        now = time.perf_counter
        make = self.update
        on_host = self.clock.on_host  # a mark is then a time, which need not be asked for twice
        first_lr = self.base_lrs[0][0] if self.base_lrs else None
        lr = first_lr
        requested = now()
        for batch in islice(batches, steps):
            start = mark()
            waited = (start if on_host else now()) - requested
            if self.schedule is not None:
                factor = self.schedule(self.step + len(pending))
                self._set_rates_by_factor(factor)
                lr = None if first_lr is None else first_lr * factor
            microbatches = self.microbatches(batch) if splits else (batch,)
            losses, norm, outcome = make(
                models, optimizers, precision, parallel, loss_of, microbatches, clip_norm
            )
            for call in after_step:
                call()
            end = mark()
            pending.append((losses, norm, outcome, start, end, waited, lr))
            if len(pending) == self.drain_every:
                yield self._drain_steps(pending, epoch)
                pending = []
                requested = now()
            else:
                requested = end if on_host else now()
        if pending:
            yield self._drain_steps(pending, epoch)

    def reload_loss_scales(self) -> None:
        """Read the loss scales again; call it after they were changed from outside, between two blocks."""
        self._scales = self.precision.loss_scales()

    def microbatches(self, batch: Any) -> Sequence[Any]:
        """Return the micro-batches of a batch, in the memory format of the run."""
        if self.channels_last:
            batch = self.to_channels_last(batch)
        return (batch,) if self.accumulation == 1 else self.split(batch, self.accumulation)

    def _set_rates_by_factor(self, factor: float) -> None:
        for optimizer, base_lrs in zip(self.optimizers, self.base_lrs, strict=True):
            for group, base in zip(optimizer.param_groups, base_lrs, strict=True):
                if isinstance(rate := group.get("lr"), Tensor):
                    rate.fill_(base * factor)
                elif rate is not None:
                    group["lr"] = base * factor

    def _drain_steps(self, pending: list[tuple[Any, ...]], epoch: int) -> list[StepRecord]:
        """Read a block from the device in one transfer, and build its records."""
        # One transfer for all losses of the block: `item` at each step would wait for the device each time.
        stacked = torch.stack([loss for losses, *_ in pending for loss in losses])
        flat = (stacked if self.mean is None else self.mean(stacked)).tolist()
        sums, parts = self._step_losses_and_partial_losses(flat)
        norms = [norm for _, norm, *_ in pending if norm is not None]
        norm_values = iter(gather_whole(torch.stack(norms)).tolist() if norms else ())
        seconds = self.clock.seconds_between
        idle = self.clock.idle_seconds
        scales = self._scales
        step = self.step
        records = []
        last = None
        for (_, norm, outcome, start, end, waited, lr), loss, losses in zip(
            pending, sums, parts, strict=True
        ):
            before, scales = scales, outcome.loss_scales
            grad_norm = None if norm is None else next(norm_values)
            took, waited = seconds(start, end), idle(waited, last, start)
            applied = outcome.applied
            records.append(
                StepRecord(step, epoch, loss, before, scales, applied, grad_norm, took, waited, losses, lr)
            )
            last = end
            step += 1
        self._scales, self.step = scales, step
        return records

    def _step_losses_and_partial_losses(
        self, flat: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[tuple[float, ...]]]:
        """Return for each step the loss, and each of several losses, from those of all micro-batches."""
        count, several = self.accumulation, self.num_losses
        by_loss = flat if count == 1 else [sum(flat[at : at + count]) for at in range(0, len(flat), count)]
        if several == 1:
            return by_loss, [()] * len(by_loss)
        parts = [tuple(by_loss[at : at + several]) for at in range(0, len(by_loss), several)]
        return list(map(sum, parts)), parts


def measure_allreduce_share(
    loop: Loop, batch: tuple[Tensor, ...], ranks: Communicator, step_seconds: float
) -> float:
    """Time further steps with and without all-reduce, alternating, and return the share that the all-reduce takes.

    Communication that overlaps with the backward pass is not counted; the wait for the slowest rank is. Call it on all
    ranks after the run is over and recorded: without all-reduce the weights of the ranks diverge.

    Args:
        loop: of the run.
        batch: on which all steps train, (batch, ...) each.
        ranks: of the run.
        step_seconds: of the slowest rank, which decide how many pairs of steps fit into a few seconds.

    Returns:
        1 - (median step without) / (median step with), the median over ranks, not below 0.
    """
    pairs = max(MIN_PAIRS, min(MAX_PAIRS, int(PAIRS_SECONDS / (2 * max(step_seconds, 1e-6)))))
    for model in loop.models:
        model.train()
    trained, microbatches = (loop.models, loop.optimizers, loop.precision), loop.microbatches(batch)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs + 1):
        for reduces in (True, False) if number % 2 else (False, True):
            ranks.any(False)  # a barrier: all ranks start the step together
            # Without all-reduce, one no_sync context around all micro-batches replaces those around all but the last.
            parallel = loop.parallel if reduces else SingleProcess()
            with nullcontext() if reduces else loop.parallel.no_sync(loop.models):
                start = loop.clock.mark()
                update(*trained, parallel, loop.loss_of, microbatches, loop.clip_norm)
                end = loop.clock.mark()
            if number:  # the first pair warms up
                seconds[reduces].append(loop.clock.seconds_between(start, end))
    share = 1 - statistics.median(seconds[False]) / max(statistics.median(seconds[True]), 1e-9)
    shares: list[float] = ranks.gather(share)
    return max(0.0, statistics.median(shares))
