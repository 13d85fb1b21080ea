"""Weights of a twin."""

import torch

from ampcompare.training.twin import change_optimized_weights, change_weights


def test_each_weight_moves_by_one_part_in_512() -> None:
    """It goes up or down, the same way in each call, and no random number of the training is used."""
    first, second = torch.ones(64), torch.ones(64)
    state = torch.get_rng_state()
    change_weights([first])
    change_weights([second])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, second)
    assert set(first.tolist()) == {1 + 2.0**-9, 1 - 2.0**-9}


def test_what_an_optimizer_gets_changes_once() -> None:
    """A second optimizer of the same weights finds them changed, and later ones are left as they are."""
    layer, other = torch.nn.Linear(4, 4), torch.nn.Linear(2, 2)
    before, later = layer.weight.detach().clone(), other.weight.detach().clone()
    end = change_optimized_weights()
    torch.optim.SGD(layer.parameters(), lr=0.1)
    torch.optim.AdamW(layer.parameters(), lr=0.1)
    end()
    torch.optim.SGD(other.parameters(), lr=0.1)
    ratio = (layer.weight.detach() / before - 1) * 512
    assert set(ratio.round(decimals=2).abs().flatten().tolist()) == {1.0}
    assert torch.equal(other.weight.detach(), later)
