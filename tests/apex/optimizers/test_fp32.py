"""The fused optimizers against the fp32 arithmetic of Apex's kernels, where numbers arrive rounded to fp32."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ampcompare.apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

F32 = np.float32
Array = npt.NDArray[np.float32]
STEPS = 6
BETA2 = 0.999


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


@pytest.mark.parametrize(
    "make",
    [
        lambda params: FusedAdam(params),
        lambda params: FusedAdam(params, capturable=True, adam_w_mode=False),
        lambda params: FusedLAMB(params, lr=0.1, max_grad_norm=1e9),
    ],
    ids=["adam", "capturable", "lamb"],
)
def test_adam_and_lamb(make: Any) -> None:
    """`exp_avg_sq` is averaged with `1 - 0.999f`, which lies a hundred units in the last place below 0.001."""
    param, optimizer = run(make)
    assert ulps(optimizer.state[param]["exp_avg_sq"], second_moment(gradients())) <= 4


def test_novograd() -> None:
    """The norm of the gradients is averaged with `1 - 0.999f`."""
    _, optimizer = run(lambda params: FusedNovoGrad(params, lr=0.01, init_zero=True))
    norm = F32(0)
    for grad in gradients():
        squares = F32(np.square(grad.astype(np.float64)).sum())
        norm = np.sqrt(F32(BETA2) * norm * norm + (F32(1) - F32(BETA2)) * squares)
    assert ulps(optimizer.param_groups[0]["exp_avg_sq"][1], np.array([norm], F32)) <= 2


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
