"""How much of a step goes into bringing the gradients of all ranks together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from ampcompare.parallel.ranks import Ranks
from ampcompare.parallel.single import Single
from ampcompare.training.loop import Loop, update

__all__ = ["allreduce_share"]

MOST_PAIRS = 10
LEAST_PAIRS = 3
SECONDS = 4.0


def allreduce_share(loop: Loop, batch: tuple[Tensor, ...], ranks: Ranks, step_seconds: float) -> float:
    """Time further steps with and without reducing gradients, in turn, and return the share that reducing takes.

    What is hidden behind the backward pass costs nothing and is not counted; the wait for the slowest rank is. Call it
    on all ranks once the run is over and everything about it is written down: steps without reducing let ranks drift.

    Args:
        loop: that has trained; its models are left in a state of no use.
        batch: of this rank, on its device.
        step_seconds: of the slowest rank, equal on all; decides how many pairs of steps fit into a few seconds.

    Returns:
        1 - (median step without) / (median step with), the median over ranks, not below 0.
    """
    pairs = max(LEAST_PAIRS, min(MOST_PAIRS, int(SECONDS / (2 * max(step_seconds, 1e-6)))))
    for model in loop.models:
        model.train()
    microbatches = loop.microbatches(batch)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs + 1):
        for reduces in (True, False) if number % 2 else (False, True):
            ranks.any(False)  # all begin together
            took = _step(loop, microbatches, reduces=reduces)
            if number:  # the first of each kind warms up
                seconds[reduces].append(took)
    share = 1 - statistics.median(seconds[False]) / max(statistics.median(seconds[True]), 1e-9)
    shares: list[float] = ranks.gather(share)
    return max(0.0, statistics.median(shares))


def _step(loop: Loop, microbatches: Sequence[tuple[Tensor, ...]], *, reduces: bool) -> float:
    # Without reducing, the context around all micro-batches takes the place of those around all but the last.
    parallel = loop.parallel if reduces else Single()
    with nullcontext() if reduces else loop.parallel.no_sync(loop.models, enabled=True):
        start = loop.clock.mark()
        update(loop.models, loop.optimizers, loop.precision, parallel, loop.loss_of, microbatches, loop.clip_norm)
        end = loop.clock.mark()
    return loop.clock.seconds(start, end)
