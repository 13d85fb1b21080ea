"""`half` with masters and with a dynamic scale, step by step, and roundings that keep small updates, in the mean."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompare.training.precision.base import Precision, make_precision, owned_params
from ampcompare.training.precision.stochastic_rounding import StochasticRounding, round_stochastically

X = torch.linspace(-1, 1, 24).reshape(6, 4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def start(arm: str, model: nn.Module | None = None) -> tuple[Precision, nn.Module, Optimizer]:
    model = model or net()
    precision = make_precision(arm)
    (model,), (optimizer,) = precision.prepare([model], [SGD(model.parameters(), lr=0.1, momentum=0.9)])
    return precision, model, optimizer


def step(precision: Precision, model: nn.Module, optimizer: Optimizer, x: Tensor = X) -> bool:
    """One update; return whether it was applied."""
    precision.backward(model(x).square().mean(), [optimizer])
    (applied,) = precision.step(optimizer).applied
    optimizer.zero_grad()
    return applied


@pytest.mark.parametrize("arm", ["half:masters=fp32,loss_scale=128", "half:masters=fp32,dynamic,bn_fp32"])
def test_the_steps_are_those_of_a_hand_written_fp16_optimizer(arm: str) -> None:
    """Masters move by the widened, unscaled gradient, and the model holds them rounded, to the last bit."""
    precision, model, optimizer = start(arm)
    scale = precision.loss_scales()[0]
    ours = [step(precision, model, optimizer) for _ in range(3)]
    other = net().half()
    if "bn_fp32" in arm:
        other[1].float()
    masters = [param.detach().float().clone().requires_grad_() for param in other.parameters()]
    plain = SGD(masters, lr=0.1, momentum=0.9)
    for _ in range(3):
        (other(X.half()).float().square().mean() * scale).backward()
        for param, master in zip(other.parameters(), masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float() / scale
            param.grad = None
        plain.step()
        with torch.no_grad():
            for param, master in zip(other.parameters(), masters, strict=True):
                param.copy_(master)
    assert ours == [True] * 3
    assert all(torch.equal(a, b) for a, b in zip(owned_params(optimizer), masters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_masters_keep_what_16_bits_lose() -> None:
    """Updates below half a unit in the last place add up in the masters, and are lost without them."""
    moved = {}
    for arm in ("half", "half:masters=fp32"):
        layer = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            layer.weight.fill_(1.0)
        precision = make_precision(arm)
        (model,), (optimizer,) = precision.prepare([layer], [SGD(layer.parameters(), lr=2**-13)])
        for _ in range(16):
            precision.backward(model(torch.ones(1, 1)).sum(), [optimizer])
            precision.step(optimizer)
            optimizer.zero_grad()
        moved[arm] = layer.weight.item()
    assert moved == {"half": 1.0, "half:masters=fp32": 1 - 2**-9}


def test_the_dynamic_scale_follows_its_rule() -> None:
    """An overflow halves it down to 1 and skips the step; so many good steps in a row double it."""
    precision, model, optimizer = start("half:masters=fp32,dynamic,init_scale=4,growth_interval=2")
    bad = X * float("inf")
    scales, applied = [], []
    for x in (bad, bad, bad, X, X, X, bad, X, X):
        applied.append(step(precision, model, optimizer, x))
        model[1].reset_running_stats()  # type: ignore[index,operator]
        scales.append(precision.loss_scales()[0])
    assert applied == [False, False, False, True, True, True, False, True, True]
    assert scales == [2, 1, 1, 1, 2, 2, 1, 1, 2]


def test_state_of_an_optimizer_that_has_stepped_moves_to_the_masters() -> None:
    """Preparing in the middle of a training keeps moments, in fp32, for the masters."""
    model = net()
    optimizer = Adam(model.parameters())
    model(X).square().mean().backward()
    optimizer.step()
    moments = [optimizer.state[param]["exp_avg"].clone() for param in model.parameters()]
    make_precision("half:masters=fp32").prepare([model], [optimizer])
    masters = owned_params(optimizer)
    assert {master.dtype for master in masters} == {torch.float32}
    assert all(
        torch.equal(optimizer.state[m]["exp_avg"], old) for m, old in zip(masters, moments, strict=True)
    )
    assert len(optimizer.state) == len(masters)


class Operations(TorchDispatchMode):
    """Counts operations of torch, and those that check bf16 by a kernel that CUDA has for other types only."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.without_kernel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts[name] += 1
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            self.without_kernel += any(tensor.dtype is torch.bfloat16 for tensor in args[0])
        return func(*args, **(kwargs or {}))


def test_bf16_gradients_are_checked_by_what_cuda_has() -> None:
    """A dynamic scale in pure bf16 skips an overflow and divides others exactly, empty parameters among them."""
    layer = nn.Linear(4, 2)
    empty = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    precision = make_precision("half:bf16,dynamic")
    optimizer = SGD([*layer.parameters(), empty], lr=1.0)
    (model,), (optimizer,) = precision.prepare([layer], [optimizer])  # type: ignore[assignment]
    applied = []
    with Operations() as mode:
        for factor in (1.0, float("inf"), 1.0):
            before = model.weight.detach().clone()  # type: ignore[operator]
            empty.grad = torch.empty_like(empty)
            precision.backward(model(X).float().square().mean() * factor, [optimizer])
            (grad,) = [param.grad for param in precision.unscale(optimizer) if param is model.weight]
            applied += precision.step(optimizer).applied
            moved = before - grad if factor == 1.0 else before  # type: ignore[operator]
            assert torch.equal(model.weight, moved)  # type: ignore[arg-type]
            optimizer.zero_grad()
    assert applied == [True, False, True]
    assert precision.loss_scales() == (2.0**15,)
    assert mode.without_kernel == 0


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
        rounding.round_into(targets, values)
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
