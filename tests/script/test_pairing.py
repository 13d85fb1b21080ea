"""Hashes of first batches and weights, and the seed."""

import torch
from torch import nn

from ampcompare.base.patches import Layer, PatchPoints, Subscriptions
from ampcompare.script.watch.cell_facts import FirstBatchesHashWatch


def test_first_batches_are_those_of_the_first_module_after_each_backward_pass() -> None:
    """Inner modules, evaluation and later calls of one step do not count; after three batches nothing is watched."""
    found: list[list[str]] = []
    FirstBatchesHashWatch(lambda hashes, draws: found.append(hashes))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for value in (1.0, 2.0, 1.0, 3.0):
        with torch.no_grad():
            model(torch.zeros(1, 2))
        loss = model(torch.full((1, 2), value)).sum()
        model(torch.full((1, 2), 7.0))
        loss.backward()
    ((one, two, three),) = found
    assert one == three != two


def test_a_batch_is_what_the_script_passes_by_name_too() -> None:
    """And not what an arm makes of it."""
    events = Subscriptions(Layer.STAND_IN)
    events.wrap(
        *PatchPoints.FORWARD,
        lambda original, module, *args, **kwargs: original(module, input=torch.zeros(1, 2)),
    )
    batches = FirstBatchesHashWatch(lambda hashes, draws: None)
    for value in (1.0, 2.0):
        nn.Linear(2, 2)(input=torch.full((1, 2), value)).sum().backward()
    batches.end()
    events.end()
    assert len(set(batches.hashes)) == 2


def test_a_model_that_draws_says_so() -> None:
    """Two runs of equal weights and batches differ by what dropout draws, where the generators differ."""
    found: list[list[str]] = []
    for layer, seed in ((nn.Dropout(), 1), (nn.Dropout(), 2), (nn.ReLU(), 2)):
        torch.manual_seed(seed)
        watch = FirstBatchesHashWatch(lambda hashes, draws: found.append(draws))
        weight = torch.ones(1, 2, requires_grad=True)
        layer(weight).sum().backward()
        watch.end()
    dropped, others, none = found
    assert len(dropped) == len(others) == 1
    assert dropped != others
    assert none == []
