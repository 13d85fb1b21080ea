"""LARC against its formula in fp64, and as a wrapper."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.apex.optimizers import FusedSGD
from ampcompare.apex.parallel.LARC import LARC
from tests.covering import covering


def params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (4,), ())]


def expected_gradient(
    p: Tensor, g: Tensor, lr: float, decay: float, trust: float, clip: bool, eps: float
) -> Tensor:
    p, g = p.double(), g.double()
    if not p.norm() or not g.norm():
        return g
    ratio = trust * p.norm() / (g.norm() + decay * p.norm() + eps)
    ratio = min(ratio / lr, torch.tensor(1.0)) if clip else ratio
    return (g + decay * p) * ratio


@covering(
    {
        "clip": [True, False],
        "decay": [0.0, 0.1],
        "trust": [0.02, 10.0],
        "inner": [torch.optim.SGD, FusedSGD],
        "tensor_lr": [False, True],
    }
)
def test_gradients_and_steps(clip: bool, decay: float, trust: float, inner: Any, tensor_lr: bool) -> None:
    """Gradients become what the formula says, and the inner optimizer steps on them without its own weight decay."""
    ours, lr, eps = params(), 0.5, 1e-3
    optimizer = LARC(
        inner(ours, lr=torch.tensor(lr) if tensor_lr else lr, weight_decay=decay), trust, clip, eps
    )
    grads = [torch.randn_like(p) for p in ours]
    before = [p.detach().clone() for p in ours]
    for p, g in zip(ours, grads, strict=True):
        p.grad = g.clone()
    optimizer.step()
    for p, g, old in zip(ours, grads, before, strict=True):
        expected = expected_gradient(old, g, lr, decay, trust, clip, eps)
        torch.testing.assert_close(p.grad.double(), expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(p.detach().double(), old.double() - lr * expected, rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Norms of narrow tensors are taken in fp32, so a norm beyond fp16's range does not matter; fp64 stays exact."""
    p = nn.Parameter(torch.full((200,), 300.0 if dtype is not torch.float16 else 6e4, dtype=dtype))
    p.grad = torch.ones_like(p)
    expected = expected_gradient(p.detach(), p.grad, 1.0, 0.0, 1e-5, False, 1e-8)
    LARC(torch.optim.SGD([p], lr=1.0), trust_coefficient=1e-5, clip=False).step()
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(p.grad.double(), expected, rtol=tolerance, atol=0)


def test_zero_norms_and_missing_gradients() -> None:
    """A zero parameter or gradient is left alone, without weight decay, as in Apex; so is one without gradient."""
    zero, still, missing = (
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2)),
    )
    zero.grad, still.grad = torch.ones(2), torch.zeros(2)
    LARC(torch.optim.SGD([zero, still, missing], lr=0.5, weight_decay=0.1)).step()
    assert zero.tolist() == [-0.5, -0.5]
    assert still.tolist() == missing.tolist() == [1.0, 1.0]


def test_it_is_a_view_of_the_inner_optimizer() -> None:
    """State, groups, state dicts, `zero_grad`, `add_param_group` and repr are the inner optimizer's."""
    ours, extra = params(), nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD(ours, lr=0.1, momentum=0.9)
    optimizer = LARC(inner)
    assert not isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.state is inner.state
    assert optimizer.param_groups is inner.param_groups
    assert repr(optimizer) == repr(inner)
    optimizer.add_param_group({"params": [extra]})
    assert len(inner.param_groups) == 2
    for p in (*ours, extra):
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"].keys() == inner.state_dict()["state"].keys() == {0, 1, 2, 3}
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    assert all(p.grad is None for p in (*ours, extra))
    optimizer.param_groups = inner.param_groups[:1]
    assert len(inner.param_groups) == 1
    assert len(copy.deepcopy(optimizer).param_groups) == 1


def test_weight_decay_survives_a_failing_step() -> None:
    """An exception in the inner step does not leave weight decay at 0."""

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError

    optimizer = LARC(Broken(params(), lr=0.1, weight_decay=0.3))
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.3


def test_the_decay_of_fp64_parameters_is_fp64() -> None:
    """A weight decay that fp32 cannot hold enters fp64 gradients with all its digits."""
    param = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    optimizer = LARC(torch.optim.SGD([param], lr=0.5, weight_decay=0.1), 0.02, False, 0.0)
    grad = torch.tensor([1.0, 2.0], dtype=torch.float64)
    param.grad = grad.clone()
    before = param.detach().clone()
    optimizer.step()
    expected = expected_gradient(before, grad, 0.5, 0.1, 0.02, False, 0.0)
    torch.testing.assert_close(param.grad, expected, rtol=1e-15, atol=0)
