"""The pool of ranks itself: results in order, and failures that name the rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist


def total(start: int) -> tuple[int, float]:
    value = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def raise_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ArithmeticError("the last rank is unwell")


def die_on_first() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


def test_values_come_back_in_order(ranks: Any) -> None:
    assert ranks(2, total, start=3) == [(0, 7.0), (1, 7.0)]


def test_failures_name_their_rank(own_ranks: Any) -> None:
    """An exception is shown with its traceback and a death with its exit code, at once; the next call works again."""
    with pytest.raises(AssertionError, match=r"(?s)rank 1: Traceback.*raise_on_last.*the last rank is unwell"):
        own_ranks(2, raise_on_last)
    with pytest.raises(AssertionError, match="rank 0: ended with exit code 7"):
        own_ranks(2, die_on_first)
    assert own_ranks(2, total, start=0) == [(0, 1.0), (1, 1.0)]
