"""Hashes of first batches and weights, and the seed."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from ampcompare.script.watch import FirstBatches, seed_all, weights_of


def test_first_batches_are_those_of_the_first_module_after_each_step() -> None:
    """Inner modules, evaluation and later calls of one step do not count; after three batches nothing is watched."""
    found: list[list[str]] = []
    batches = FirstBatches(found.append)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for value in (1.0, 2.0, 1.0, 3.0):
        with torch.no_grad():
            model(torch.zeros(1, 2))
        model(torch.full((1, 2), value))
        model(torch.full((1, 2), 7.0))
        batches.stepped()
    ((one, two, three),) = found
    assert one == three != two


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_input_of_a_trace_is_no_batch() -> None:
    """The hash of one would be an operation of the traced module."""
    batches = FirstBatches(lambda hashes: None)
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    batches.end()
    assert not batches.hashes


def test_equal_seeds_give_equal_draws() -> None:
    draws = []
    for _ in range(2):
        seed_all(3)
        draws.append((random.random(), torch.rand(1).item()))
    assert draws[0] == draws[1]


def test_weights_have_one_hash_whatever_holds_them() -> None:
    model = nn.Linear(2, 2)
    before = weights_of([model])
    assert before == weights_of([model])
    with torch.no_grad():
        model.bias[0] += 1
    assert weights_of([model]) != before
