"""The buckets of Apex's DistributedDataParallel: which gradients are reduced together, and in which order."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampcompare.apex.parallel import DistributedDataParallel as DDP
from tests.distributed.two_layers import Net, assert_grads, batch, mean_over_ranks


def records_arrival_order() -> dict[str, list[list[str]]]:
    result = {}
    layers = [nn.Linear(4, 4) for _ in range(3)]
    for name, size in {"small": 1, "pairs": 24}.items():
        model = DDP(nn.Sequential(*layers), message_size=size)
        assert model.needs_refresh
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
        assert not model.needs_refresh
        names = {id(param): name for name, param in model.module.named_parameters()}
        buckets = model._synchronizer.buckets
        assert buckets is not None
        result[name] = [[names[id(param)] for param in bucket.params] for bucket in buckets]
    return result


def overlaps_on_the_host() -> list[int]:
    sizes = []
    for options in ({}, {"message_size": 100_000_000}):
        model = DDP(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), **options)
        model(torch.randn(2, 512)).sum().backward()
        assert model._synchronizer.buckets is not None
        sizes.append(len(model._synchronizer.buckets))
    return sizes


def follows_rank_0() -> list[list[int]]:
    """Let ranks use their layers in different order in the first pass."""
    left, right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    order = [left, right] if dist.get_rank() == 0 else [right, left]

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = left, right

        def forward(self, x: Tensor) -> Tensor:
            for layer in order:
                x = layer(x)
            return x

    model = DDP(Chain(), message_size=1)
    for step in range(3):
        model.zero_grad()
        model(batch(step)).sum().backward()
    assert model._synchronizer.buckets is not None
    ids = [id(left.weight), id(right.weight)]
    return [[ids.index(id(param)) for param in bucket.params] for bucket in model._synchronizer.buckets]


def refreshes_when_parameters_change() -> None:
    model = DDP(Net(), message_size=1)
    for step in range(6):
        frozen = step in (2, 3)
        model.module.second.requires_grad_(not frozen)
        expected = mean_over_ranks(model.module, step)
        model.zero_grad()
        model(batch(step)).square().sum().backward()
        if frozen:
            expected = [*expected[:2], None, None]
        assert_grads(model.module, expected)
    model.double()
    model.zero_grad()
    expected = mean_over_ranks(model.module, 9)
    model(batch(9, dtype=torch.float64)).square().sum().backward()
    assert_grads(model.module, expected, rtol=1e-12)


def test_buckets_follow_what_is_trained(ranks: Any) -> None:
    """Freezing a layer, training it again and another dtype give new buckets; gradients stay the average."""
    ranks(2, refreshes_when_parameters_change)


def test_buckets_follow_arrival(ranks: Any) -> None:
    """The first pass orders buckets from the last layer back, and their size closes them."""
    first, second = ranks(2, records_arrival_order)
    assert first == second
    assert sorted(itertools.chain(*first["small"])) == sorted(
        f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")
    )
    assert [bucket[0][0] for bucket in first["small"]] == ["2", "2", "1", "1", "0", "0"]
    assert [len(bucket) for bucket in first["small"]] == [1] * 6
    # 16 + 4 elements are under 24, and with the next parameter above or at it.
    assert len(first["pairs"]) < 6


def test_default_message_size_overlaps_on_the_host(ranks: Any) -> None:
    """Without a GPU the default size makes several buckets, an explicit one makes one."""
    for several, explicit in ranks(2, overlaps_on_the_host):
        assert (several > 1, explicit) == (True, 1)


def test_rank_0_decides_the_buckets(ranks: Any) -> None:
    """Ranks whose gradients arrive in different order reduce in rank 0's order."""
    assert ranks(2, follows_rank_0) == [[[1], [0]], [[1], [0]]]
