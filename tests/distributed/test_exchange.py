"""The share of a step that reducing gradients takes, on two ranks of which nothing else is written down afterwards."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ampcompare.settings.config import RunConfig
from ampcompare.training.loop import MAX_PAIRS, measure_allreduce_share
from ampcompare.training.parallel.ranks import ProcessGroup
from tests.distributed.sessions import CPU, make_session

STEP_SECONDS = 0.01
Run = Callable[..., list[Any]]


def share(kind: str, arm: str, accumulation: int, wait: float = 0.0) -> tuple[float, int]:
    """Return the share, and how many reductions of gradients Apex's wrapper has asked for.

    Args:
        wait: seconds that each of these takes longer.
    """
    recipe = {
        "data": {"name": "synthetic", "train_size": 64, "val_size": 32, "image_size": 8},
        "model": {"arch": "mlp"},
        "epochs": 1,
        "batch_size": 8,
        "grad_accum_steps": accumulation,
    }
    settings = {"recipe": recipe, "arm": arm, "processes": 2, "parallel": {"kind": kind}}
    session = make_session(RunConfig.model_validate(settings))
    for _ in session.train_and_yield_events():
        pass
    ranks = ProcessGroup(CPU)
    batch = next(
        iter(session.assembly.task.data.train_batches(0, 8, device=CPU, rank=ranks.rank, world_size=2))
    )
    all_reduce, reductions = dist.all_reduce, 0

    def slow(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal reductions
        if tensor.dtype is not torch.float64:  # in which ranks talk about other things
            reductions += 1
            time.sleep(wait)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = slow
    try:
        return measure_allreduce_share(session.loop, batch, ranks, STEP_SECONDS), reductions
    finally:
        dist.all_reduce = all_reduce


@pytest.mark.parametrize(("kind", "accumulation"), [("ddp", 1), ("apex-ddp", 2)])
def test_ranks_agree_on_the_share(ranks: Run, kind: str, accumulation: int) -> None:
    (one, _), (other, _) = ranks(2, share, kind=kind, arm="apex:O2,loss_scale=128", accumulation=accumulation)
    assert one == other
    assert 0 <= one < 1


def test_slow_reductions_are_seen(ranks: Run) -> None:
    """Where each takes fifty milliseconds, most of a step is the exchange; half of the timed steps reduce nothing."""
    (found, reductions), _ = ranks(2, share, kind="apex-ddp", arm="fp32", accumulation=1, wait=0.05)
    assert found > 0.5
    assert reductions == MAX_PAIRS + 1
