"""The fused optimizers against the fp32 arithmetic of Apex's kernels, where numbers arrive rounded to fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ampcompare.apex.optimizers import FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD

F32 = np.float32
Array = npt.NDArray[np.float32]
STEPS = 6
BETA1, BETA2 = 0.9, 0.999


def gradients() -> list[Array]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(64).astype(F32) for _ in range(STEPS)]


def run(optimizer_of: Any) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    param = torch.nn.Parameter(torch.linspace(-1, 1, 64))
    optimizer = optimizer_of([param])
    for grad in gradients():
        param.grad = torch.from_numpy(grad.copy())
        optimizer.step()
    return param, optimizer


def ulps(ours: torch.Tensor, theirs: Array) -> int:
    """Return the largest distance in units in the last place."""
    a = ours.detach().numpy().astype(F32)
    return int(np.max(np.abs(a.astype(np.float64) - theirs.astype(np.float64)) / np.spacing(np.abs(theirs))))


def second_moment(grads: list[Array]) -> Array:
    beta = F32(BETA2)
    moment = np.zeros(64, F32)
    for grad in grads:
        moment = beta * moment + (F32(1) - beta) * grad * grad
    return moment


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("adam_w", [False, True])
def test_adam(capturable: bool, adam_w: bool) -> None:
    """`exp_avg_sq` is averaged with `1 - 0.999f`, which lies a hundred units in the last place below 0.001."""
    param, optimizer = run(lambda params: FusedAdam(params, capturable=capturable, adam_w_mode=adam_w))
    assert ulps(optimizer.state[param]["exp_avg_sq"], second_moment(gradients())) <= 4


@pytest.mark.parametrize("kind", [FusedLAMB, FusedMixedPrecisionLamb])
def test_lamb(kind: Any) -> None:
    """Both LAMBs average with `1 - 0.999f`, and their weights follow the kernels over several steps."""
    lr, eps, decay = F32(0.1), F32(1e-6), F32(0.01)
    beta1, beta2 = F32(BETA1), F32(BETA2)
    param, optimizer = run(lambda params: kind(params, lr=0.1, max_grad_norm=1e9))
    assert ulps(optimizer.state[param]["exp_avg_sq"], second_moment(gradients())) <= 4
    weights, first, second = np.linspace(-1, 1, 64).astype(F32), np.zeros(64, F32), np.zeros(64, F32)
    weights[:] = torch.linspace(-1, 1, 64).numpy()
    for number, grad in enumerate(gradients(), 1):
        first = beta1 * first + (F32(1) - beta1) * grad
        second = beta2 * second + (F32(1) - beta2) * grad * grad
        correction1, correction2 = F32(1 - float(beta1) ** number), F32(1 - float(beta2) ** number)
        update = (first / correction1) / (np.sqrt(second / correction2) + eps) + decay * weights
        ratio = lr * F32(np.linalg.norm(weights.astype(np.float64)) / np.linalg.norm(update.astype(np.float64)))
        weights = weights - ratio * update
    large = np.abs(weights) > 0.05
    assert ulps(param[torch.from_numpy(large)], weights[large]) <= 16


@pytest.mark.parametrize("inside", [False, True])
def test_novograd(inside: bool) -> None:
    """Averaged norms and weights follow the kernels in both moment modes."""
    lr, eps, decay = F32(0.01), F32(1e-8), F32(0.1)
    beta1, beta2 = F32(BETA1), F32(BETA2)
    param, optimizer = run(
        lambda params: FusedNovoGrad(params, lr=0.01, weight_decay=0.1, reg_inside_moment=inside, init_zero=True)
    )
    weights, first, norm = torch.linspace(-1, 1, 64).numpy().copy(), np.zeros(64, F32), F32(0)
    for number, grad in enumerate(gradients(), 1):
        squares = F32(np.square(grad.astype(np.float64)).sum())
        norm = np.sqrt(beta2 * norm * norm + (F32(1) - beta2) * squares)
        correction1 = F32(1 - float(beta1) ** number)
        correction2 = F32(np.sqrt(1 - float(beta2) ** number))
        denominator = norm / correction2 + eps
        if inside:
            first = beta1 * first + (F32(1) - beta1) * (grad / denominator + decay * weights)
            update = first / correction1
        else:
            first = beta1 * first + (F32(1) - beta1) * grad
            update = (first / correction1) / denominator + decay * weights
        weights = weights - lr * update
    assert ulps(optimizer.param_groups[0]["exp_avg_sq"][1], np.array([norm], F32)) <= 2
    large = np.abs(weights) > 0.05
    assert ulps(param[torch.from_numpy(large)], weights[large]) <= 3


def test_sgd() -> None:
    """The momentum takes a gradient's share as `1 - dampening` in fp32."""
    param, optimizer = run(lambda params: FusedSGD(params, lr=0.1, momentum=0.5, dampening=0.999))
    first, *others = gradients()
    buffer = first
    for grad in others:
        buffer = F32(0.5) * buffer + (F32(1) - F32(0.999)) * grad
    buffer_of = optimizer.state[param]["momentum_buffer"]
    large = np.abs(buffer) > 1e-2
    assert ulps(buffer_of[torch.from_numpy(large)], buffer[large]) <= 4
