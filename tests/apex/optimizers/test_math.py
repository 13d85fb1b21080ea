"""Each fused optimizer against its formulas, written out per parameter in fp64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ampcompare.apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedNovoGrad,
    FusedSGD,
)
from tests.covering import covering

SHAPES = [(3, 2), (5,), (2, 3, 1, 2), ()]
STEPS = 5
HALF = [torch.float16]
NARROW = [torch.float16, torch.bfloat16]


class Reference:
    """fp64 weights, the gradients of all steps, and one dictionary of state for each parameter."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
        self.grads = [[torch.randn(s, generator=generator).to(dtype) for s in SHAPES] for _ in range(STEPS)]
        self.exact = [p.detach().double() for p in self.params]
        self.state: list[dict[str, Any]] = [{} for _ in SHAPES]


Formula = Callable[[Reference, int, list[Tensor]], None]


def follow(reference: Reference, optimizer: torch.optim.Optimizer, formula: Formula) -> None:
    for number, grads in enumerate(reference.grads, start=1):
        for param, grad in zip(reference.params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        formula(reference, number, [grad.double() for grad in grads])


def assert_followed(reference: Reference, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    for param, exact in zip(reference.params, reference.exact, strict=True):
        assert param.dtype is dtype
        torch.testing.assert_close(param.detach().double(), exact, rtol=tolerance, atol=tolerance)


def averages(
    state: dict[str, Any], grad: Tensor, share: float, b1: float, b2: float
) -> tuple[Tensor, Tensor]:
    state["m"] = b1 * state.get("m", torch.zeros_like(grad)) + share * grad
    state["v"] = b2 * state.get("v", torch.zeros_like(grad)) + (1 - b2) * grad**2
    return state["m"], state["v"]


@covering(
    {
        "dtype": [torch.float32, *NARROW],
        "decay": [0.0, 0.1],
        "adam_w": [True, False],
        "correct": [True, False],
    }
)
def test_adam(dtype: torch.dtype, decay: float, adam_w: bool, correct: bool) -> None:
    """FusedAdam follows Adam's formulas in both decay modes, with and without bias correction, in each dtype."""
    lr, b1, b2, eps = 0.05, 0.8, 0.95, 1e-4

    def formula(reference: Reference, number: int, grads: list[Tensor]) -> None:
        c1, c2 = (1 - b1**number, 1 - b2**number) if correct else (1.0, 1.0)
        for p, g, state in zip(reference.exact, grads, reference.state, strict=True):
            m, v = averages(state, g if adam_w else g + decay * p, 1 - b1, b1, b2)
            update = (m / c1) / ((v / c2).sqrt() + eps)
            p -= lr * (update + decay * p if adam_w else update)

    reference = Reference(dtype)
    options = {"lr": lr, "betas": (b1, b2), "eps": eps, "weight_decay": decay, "adam_w_mode": adam_w}
    for capturable in (False, True):
        reference = Reference(dtype)
        optimizer = FusedAdam(reference.params, bias_correction=correct, capturable=capturable, **options)
        follow(reference, optimizer, formula)
        assert_followed(reference, dtype)
        for param, state in zip(reference.params, reference.state, strict=True):
            kept = optimizer.state[param]
            assert kept["exp_avg"].dtype is kept["exp_avg_sq"].dtype is torch.float32
            tolerance = 1e-5 if dtype is torch.float32 or adam_w else 2e-2
            torch.testing.assert_close(kept["exp_avg"].double(), state["m"], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(
                kept["exp_avg_sq"].double(), state["v"], rtol=tolerance, atol=tolerance
            )


@covering(
    {
        "dtype": [torch.float32, *HALF],
        "momentum,dampening,nesterov": [(0.0, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)],
        "decay": [0.0, 0.1],
        "late": [True, False],
    }
)
def test_sgd(
    dtype: torch.dtype, momentum: float, dampening: float, nesterov: bool, decay: float, late: bool
) -> None:
    """FusedSGD follows SGD's formulas with momentum, dampening, nesterov, and weight decay early or late."""
    lr = 0.05

    def formula(reference: Reference, number: int, grads: list[Tensor]) -> None:
        for p, g, state in zip(reference.exact, grads, reference.state, strict=True):
            g = g if late else g + decay * p
            if momentum:
                m = g if number == 1 else momentum * state["m"] + (1 - dampening) * g
                state["m"] = m
                g = g + momentum * m if nesterov else m
            p -= lr * (g + decay * p if late else g)

    reference = Reference(dtype)
    options = {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov}
    optimizer = FusedSGD(reference.params, lr=lr, wd_after_momentum=late, **options)
    follow(reference, optimizer, formula)
    assert_followed(reference, dtype)
    for param in reference.params:
        assert optimizer.state[param]["momentum_buffer"].dtype is dtype


@covering({"dtype": [torch.float32, *HALF], "decay": [0.0, 0.1], "decoupled": [True, False]})
def test_adagrad(dtype: torch.dtype, decay: float, decoupled: bool) -> None:
    """FusedAdagrad follows Adagrad's formulas with both kinds of weight decay."""
    lr, eps = 0.05, 1e-6

    def formula(reference: Reference, number: int, grads: list[Tensor]) -> None:
        for p, g, state in zip(reference.exact, grads, reference.state, strict=True):
            g = g if decoupled else g + decay * p
            state["h"] = state.get("h", 0.0) + g**2
            update = g / (state["h"].sqrt() + eps)
            p -= lr * (update + decay * p if decoupled else update)

    reference = Reference(dtype)
    optimizer = FusedAdagrad(reference.params, lr=lr, eps=eps, weight_decay=decay, adagrad_w_mode=decoupled)
    follow(reference, optimizer, formula)
    assert_followed(reference, dtype)
    assert all(optimizer.state[param]["sum"].dtype is dtype for param in reference.params)


LAMB_OPTIONS: list[dict[str, Any]] = [
    {},
    {"adam_w_mode": False},
    {"bias_correction": False, "grad_averaging": False},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "use_nvlamb": True},
    {"max_grad_norm": 1e6},
]


def lamb_formula(options: dict[str, Any], lr: float, b1: float, b2: float, eps: float) -> Formula:
    decay = options.get("weight_decay", 0.01)
    decoupled = options.get("adam_w_mode", True)

    def formula(reference: Reference, number: int, grads: list[Tensor]) -> None:
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        divisor = max(norm / options.get("max_grad_norm", 1.0), 1.0)
        c1, c2 = (1 - b1**number, 1 - b2**number) if options.get("bias_correction", True) else (1.0, 1.0)
        share = 1 - b1 if options.get("grad_averaging", True) else 1.0
        for p, g, state in zip(reference.exact, grads, reference.state, strict=True):
            g = g / divisor
            m, v = averages(state, g if decoupled else g + decay * p, share, b1, b2)
            update = (m / c1) / ((v / c2).sqrt() + eps) + (decay * p if decoupled else 0)
            ratio = 1.0
            if (decay or options.get("use_nvlamb")) and p.norm() and update.norm():
                ratio = float(p.norm() / update.norm())
            p -= lr * ratio * update
            state["update"] = update

    return formula


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("options", LAMB_OPTIONS, ids=str)
def test_lamb(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """FusedLAMB follows LAMB's formulas, clips by the common norm, and leaves the update in the gradients."""
    lr, b1, b2, eps = 0.02, 0.8, 0.95, 1e-4
    reference = Reference(dtype)
    optimizer = FusedLAMB(reference.params, lr=lr, betas=(b1, b2), eps=eps, **options)
    follow(reference, optimizer, lamb_formula(options, lr, b1, b2, eps))
    assert_followed(reference, dtype)
    for param, state in zip(reference.params, reference.state, strict=True):
        assert optimizer.state[param]["exp_avg"].dtype is dtype
        tolerance = 1e-4 if dtype is torch.float32 else 5e-2
        torch.testing.assert_close(param.grad.double(), state["update"], rtol=tolerance, atol=tolerance)


@covering(
    {
        "dtype": [torch.float32, *HALF],
        "inside": [True, False],
        "norm_type": [2, 0],
        "init_zero": [True, False],
        "averaging,correct": [(True, True), (False, False)],
    }
)
def test_novograd(
    dtype: torch.dtype, inside: bool, norm_type: int, init_zero: bool, averaging: bool, correct: bool
) -> None:
    """FusedNovoGrad follows its formulas: both orders, both norms, both starts."""
    lr, b1, b2, eps, decay = 0.02, 0.8, 0.95, 1e-4, 0.1

    def formula(reference: Reference, number: int, grads: list[Tensor]) -> None:
        c1, c2 = (1 - b1**number, math.sqrt(1 - b2**number)) if correct else (1.0, 1.0)
        share = 1 - b1 if averaging else 1.0
        for p, g, state in zip(reference.exact, grads, reference.state, strict=True):
            n = float(g.norm() if norm_type == 2 else g.abs().max())
            s = state.get("s", 0.0 if init_zero else n)
            s = math.sqrt(b2 * s**2 + (1 - b2) * n**2) if norm_type == 2 else b2 * s + (1 - b2) * n
            state["s"] = s
            denominator = s / c2 + eps
            if inside:
                g = g / denominator + decay * p
            state["m"] = b1 * state.get("m", 0.0) + share * g
            update = state["m"] / c1 if inside else state["m"] / c1 / denominator + decay * p
            p -= lr * update

    reference = Reference(dtype)
    options: dict[str, Any] = {
        "lr": lr,
        "betas": (b1, b2),
        "eps": eps,
        "weight_decay": decay,
        "init_zero": init_zero,
    }
    options |= {"bias_correction": correct, "reg_inside_moment": inside, "grad_averaging": averaging}
    optimizer = FusedNovoGrad(reference.params, norm_type=norm_type, **options)
    follow(reference, optimizer, formula)
    assert_followed(reference, dtype)
    halves, floats = optimizer.param_groups[0]["exp_avg_sq"]
    kept, empty = (floats, halves) if dtype is torch.float32 else (halves, floats)
    expected = torch.tensor([state["s"] for state in reference.state], dtype=torch.float64)
    torch.testing.assert_close(kept.double(), expected, rtol=1e-3, atol=1e-3)
    assert kept.dtype is torch.float32
    assert empty.numel() == 0
