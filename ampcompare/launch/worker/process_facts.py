"""What differs between the ranks of a cell, gathered for its record."""

from __future__ import annotations

import statistics
from typing import Any

import torch.distributed as dist

from ampcompare.launch.distributed_env import DistributedEnv
from ampcompare.parallel.ranks import weights_digest
from ampcompare.records.run import ProcessFacts, RunSummary
from ampcompare.settings.config import RunConfig
from ampcompare.training.metrics.allreduce import allreduce_share
from ampcompare.training.session import Session

__all__ = ["gather_process_facts"]


def gather_process_facts(
    config: RunConfig, session: Session, world: DistributedEnv, summary: RunSummary
) -> ProcessFacts:
    """Gather what differs between ranks. All ranks call it, after training: it trains further steps to time them.

    Args:
        summary: of this rank.
    """
    assembly, ranks = session.assembly, session.assembly.ranks
    by_rank = ranks.gather((summary.step_seconds_median, summary.peak_bytes, summary.start_seconds))
    seconds = [step_seconds for step_seconds, _, _ in by_rank if step_seconds is not None]
    wrapper = type(assembly.models[0])
    weights = weights_digest(assembly.replicas)  # before further steps change them
    share = None
    # Where forward passes wait for other ranks, no other program would make a step without reducing.
    ended_well = summary.diverged_step is None and not session.interrupted
    if ranks.size > 1 and seconds and ended_well and not assembly.parallel.waits_in_forward:
        part: dict[str, Any] = {"device": assembly.device, "rank": ranks.rank, "world_size": ranks.size}
        batch = next(iter(assembly.task.data.train_batches(0, config.recipe.batch_size, **part)))
        share = allreduce_share(session.loop, batch, ranks, max(seconds))
    return ProcessFacts(
        world_size=ranks.size,
        nodes=world.nodes,
        global_batch_size=config.total_batch_size,
        backend=dist.get_backend(),
        wrapper=f"{wrapper.__module__}.{wrapper.__qualname__}",
        launcher=world.launcher,
        start_seconds=max((started for *_, started in by_rank if started is not None), default=None),
        allreduce_share=share,
        step_seconds_by_rank=seconds,
        step_seconds_slowest=max(seconds, default=None),
        step_seconds_median=statistics.median(seconds) if seconds else None,
        peak_bytes_by_rank=[peak for _, peak, _ in by_rank if peak is not None],
        weights=weights,
    )
