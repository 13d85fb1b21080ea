"""Weights of a twin, and hashes of weights: what changes them and what does not."""

import pytest
import torch
from torch import nn

from ampcompare.training.hashes import inputs_sha256, parameters_sha256, weights_sha256
from ampcompare.training.twin import perturb_weights, perturb_weights_given_to_optimizers


def test_each_weight_moves_by_one_part_in_512() -> None:
    """It goes up or down, the same way in each call, and no random number of the training is used."""
    first, second = torch.ones(64), torch.ones(64)
    state = torch.get_rng_state()
    perturb_weights([first])
    perturb_weights([second])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, second)
    assert set(first.tolist()) == {1 + 2.0**-9, 1 - 2.0**-9}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_16_bit_weight_moves(dtype: torch.dtype) -> None:
    """Also where one part in 512 is below half a unit in the last place; zeros and what is not finite stay."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    weights = every[every.isfinite()]
    moved = weights.clone()
    perturb_weights([moved])
    last = weights.abs() >= torch.finfo(dtype).max / 1.01  # of which some would be infinite
    assert torch.equal((moved == weights)[~last], (weights == 0)[~last])
    assert bool(moved.isfinite().all())
    normal = weights.abs() >= torch.finfo(dtype).smallest_normal
    share = (moved.double() / weights.double() - 1).abs()[normal & ~last]
    assert float(share.max()) <= max(2.0**-9 * 1.6, torch.finfo(dtype).eps)


def test_what_an_optimizer_gets_changes_once() -> None:
    """A second optimizer of the same weights finds them changed, and later ones are left as they are."""
    layer, other = torch.nn.Linear(4, 4), torch.nn.Linear(2, 2)
    before, later = layer.weight.detach().clone(), other.weight.detach().clone()
    end = perturb_weights_given_to_optimizers()
    torch.optim.SGD(layer.parameters(), lr=0.1)
    torch.optim.AdamW(layer.parameters(), lr=0.1)
    end()
    torch.optim.SGD(other.parameters(), lr=0.1)
    ratio = (layer.weight.detach() / before - 1) * 512
    assert set(ratio.round(decimals=2).abs().flatten().tolist()) == {1.0}
    assert torch.equal(other.weight.detach(), later)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def test_equal_weights_have_equal_hashes() -> None:
    """Two models of one seed agree in both hashes; a single bit of a single weight changes both."""
    one, other = _model(), _model()
    assert weights_sha256([one]) == weights_sha256([other])
    with torch.no_grad():
        other[0].weight[1, 2].copy_(torch.nextafter(other[0].weight[1, 2], torch.tensor(9.0)))  # type: ignore[index]
    assert weights_sha256([one]) != weights_sha256([other])
    assert parameters_sha256([one]) != parameters_sha256([other])


def test_buffers_count_at_the_end_only() -> None:
    """Running statistics move without a step: they tell two runs apart, and are no sign that weights moved."""
    one, other = _model(), _model()
    other(torch.ones(5, 4))
    assert weights_sha256([one]) != weights_sha256([other])
    assert parameters_sha256([one]) == parameters_sha256([other])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_count_and_not_their_storage(dtype: torch.dtype) -> None:
    """Weights stored in 16 bits have the hash of the same values in fp32, not of what they were rounded from."""
    narrow, wide = _model().to(dtype), _model().to(dtype).float()
    assert weights_sha256([narrow]) == weights_sha256([wide])
    assert weights_sha256([narrow]) != weights_sha256([_model()])


def test_memory_format_does_not_count() -> None:
    """A convolution in channels-last order has the hash of the same convolution in the usual order."""
    convolution = nn.Conv2d(2, 3, 3)
    usual = weights_sha256([convolution])
    assert weights_sha256([convolution.to(memory_format=torch.channels_last)]) == usual


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("stored", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_inputs(stored: str) -> None:
    """A sparse matrix, such as the edges of a graph, has a hash by its entries and their places."""
    one, moved, changed = torch.eye(3), torch.eye(3).roll(1, 0), torch.eye(3) * 2
    hashes = [inputs_sha256([getattr(matrix, stored)()]) for matrix in (one, one.clone(), moved, changed)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
