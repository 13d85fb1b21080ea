"""Roundings that keep small updates, against float64: in the mean where they draw random numbers."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.half import StochasticRounding, round_stochastically

ULP = 2.0**-7  # of bfloat16 between 1 and 2
COUNT, STEPS, RATE = 4096, 32, ULP / 10


def _moved(arm: str) -> tuple[Tensor, Tensor]:
    """Weights of 1 to 1.5 after many steps of a tenth of a unit in the last place or less, and the same in float64."""
    torch.manual_seed(0)
    start = 1 + (torch.rand(COUNT) / 2 / ULP).round() * ULP
    slopes = torch.rand(COUNT).bfloat16()
    layer = nn.Linear(COUNT, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(start)
    precision = make_precision(arm)
    (model,), (optimizer,) = precision.prepare([layer], [SGD(layer.parameters(), lr=RATE)])
    for _ in range(STEPS):
        precision.backward(-model(slopes[None]).sum(), [optimizer])
        precision.step(optimizer)
        optimizer.zero_grad()
    exact = start.double() + STEPS * RATE * slopes.double()
    weight = model.weight.detach().double()[0]  # type: ignore[operator,union-attr]
    (state,) = optimizer.state.values() if optimizer.state else ({},)
    return weight + (state["compensation"].double()[0] if "compensation" in state else 0), exact


def test_stochastic_rounding_has_the_mean_of_float64() -> None:
    """The mean error of all weights is that of chance.

    Each rounding has mean 0, and variance p(1 - p) ULP**2 <= ULP**2 / 4, since it goes up by chance p. They are
    independent, so the mean over all weights of the sum over all steps has a standard deviation of at most
    ULP / 2 * sqrt(STEPS / COUNT). Six of them are exceeded once in 5e8 runs. fp32 adds less than 2**-23 per step.
    """
    weights, exact = _moved("half:bf16,rounding=stochastic")
    bound = 6 * ULP / 2 * math.sqrt(STEPS / COUNT) + STEPS * 2.0**-23
    assert abs((weights - exact).mean().item()) < bound
    assert (exact - 1).mean() > 20 * bound / 6  # what is lost without it would be seen
    largest = (weights - exact).abs().max().item()
    assert ULP < largest < 6 * ULP / 2 * math.sqrt(STEPS)  # it is random, and no weight runs away


def test_kahan_follows_float64() -> None:
    """Weight and compensation together are float64's sum, up to the rounding of the compensation at each step.

    The compensation is at most half a unit of the weight, 2**-8; it is rounded to 8 bits, to within 2**-17 a step.
    """
    weights, exact = _moved("half:bf16,kahan")
    assert (weights - exact).abs().max() < STEPS * (2.0**-17 + 2.0**-23)


@pytest.mark.parametrize("value", [1 + ULP / 4, -(1 + 3 * ULP / 4), 3e-39, 2.0**-133 * 1.5, 1e30])
def test_a_number_goes_to_its_neighbors_in_proportion(value: float) -> None:
    """Both neighbors occur, nothing else does, and their mean is the number, subnormal ones too."""
    count = 20_000
    drawn = round_stochastically(torch.full((count,), value), torch.Generator().manual_seed(1)).double()
    low, high = drawn.min().item(), drawn.max().item()
    exact = torch.tensor(value).double().item()
    assert low < exact < high
    assert set(drawn.tolist()) == {low, high}
    assert abs(drawn.mean().item() - exact) < 6 * (high - low) / 2 / math.sqrt(count)


def test_exact_and_special_values_stay() -> None:
    """What bfloat16 has is not moved; infinities and NaN of any bits stay what they are."""
    values = torch.tensor([0.0, -0.0, 1.5, -3.0, math.inf, -math.inf])
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        assert torch.equal(round_stochastically(values, generator).float(), values)
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(nans.repeat(50), generator).isnan().all()


def test_it_draws_from_its_own_generator() -> None:
    """The random numbers of the model are not touched, and seed and count decide what is drawn."""
    values = [torch.rand(3, 5), torch.rand(4)]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    results = []
    for seed, rounds in ((7, 0), (7, 0), (7, 1), (8, 0)):
        rounding = StochasticRounding(seed)
        rounding.rounds = rounds
        targets = [torch.empty_like(value, dtype=torch.bfloat16) for value in values]
        rounding.into(targets, values)
        results.append(targets)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    for other in results[2:]:
        assert not all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_seed_is_that_of_the_run() -> None:
    """It is read when models are prepared, after the run has seeded torch."""
    precision = make_precision("half:bf16,rounding=stochastic")
    torch.manual_seed(11)
    layer = nn.Linear(2, 1)
    precision.prepare([layer], [SGD(layer.parameters(), lr=RATE)])
    assert precision.state_dict()["rounding_seed"] == 11
