"""Operations that must not be repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from ampcompare.diagnosis.shadow import Shadows
from ampcompare.diagnosis.sites import Sites
from ampcompare.diagnosis.watch import Watch


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_collective_runs_once_and_ends_the_wide_run() -> None:
    """Other ranks would wait for a second one, and the wide values of this rank are not those of all."""
    shadows = Shadows()
    with Watch(Sites(), shadows) as watch:
        reduced = torch.ones(3).bfloat16() * 2
        assert shadows.of(reduced) is not None
        distributed.all_reduce(reduced)
    assert shadows.of(reduced) is None
    names = [event.key[1] for event in watch.drain().events]
    assert names.count("allreduce") <= 1


def test_a_cast_of_integers_is_counted() -> None:
    """It has no floating input whose counts could be reused."""
    with Watch(Sites(), Shadows()) as watch:
        torch.arange(4).half()
    (event,) = (one for one in watch.drain().events if one.key[1] == "_to_copy")
    assert event.row[:256].sum() == 4
