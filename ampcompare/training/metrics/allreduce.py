"""The share of the step time that the all-reduce of gradients takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from ampcompare.training.loop import Loop, update
from ampcompare.training.parallel.ranks import Communicator
from ampcompare.training.parallel.replication import Single

__all__ = ["allreduce_share"]

MAX_PAIRS = 10
MIN_PAIRS = 3
SECONDS = 4.0


def allreduce_share(loop: Loop, batch: tuple[Tensor, ...], ranks: Communicator, step_seconds: float) -> float:
    """Time further steps with and without all-reduce, alternating, and return the share that the all-reduce takes.

    Communication that overlaps with the backward pass is not counted; the wait for the slowest rank is. Call it on all
    ranks after the run is over and recorded: without all-reduce the weights of the ranks diverge.

    Args:
        loop: of the finished run; its models are unusable afterwards.
        batch: of this rank, on its device.
        step_seconds: of the slowest rank, equal on all; decides how many pairs of steps fit into a few seconds.

    Returns:
        1 - (median step without) / (median step with), the median over ranks, not below 0.
    """
    pairs = max(MIN_PAIRS, min(MAX_PAIRS, int(SECONDS / (2 * max(step_seconds, 1e-6)))))
    for model in loop.models:
        model.train()
    microbatches = loop.microbatches(batch)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs + 1):
        for reduces in (True, False) if number % 2 else (False, True):
            ranks.any(False)  # a barrier: all ranks start the step together
            took = _step(loop, microbatches, reduces=reduces)
            if number:  # the first pair warms up
                seconds[reduces].append(took)
    share = 1 - statistics.median(seconds[False]) / max(statistics.median(seconds[True]), 1e-9)
    shares: list[float] = ranks.gather(share)
    return max(0.0, statistics.median(shares))


def _step(loop: Loop, microbatches: Sequence[tuple[Tensor, ...]], *, reduces: bool) -> float:
    # Without all-reduce, one no_sync context around all micro-batches replaces those around all but the last.
    parallel = loop.parallel if reduces else Single()
    with nullcontext() if reduces else loop.parallel.no_sync(loop.models):
        start = loop.clock.mark()
        update(loop.models, loop.optimizers, loop.precision, parallel, loop.loss_of, microbatches, loop.clip_norm)
        end = loop.clock.mark()
    return loop.clock.seconds(start, end)
