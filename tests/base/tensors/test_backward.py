"""The backward pass that starts from a kept gradient."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ampcompare.base.tensors.backward import run_backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_loss_of_any_type_has_the_gradients_of_its_own_method(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    weights = [torch.full(shape, 3.0, dtype=dtype, requires_grad=True) for _ in range(2)]
    run_backward(weights[0] ** 2)
    (weights[1] ** 2).backward()
    assert weights[0].grad is not None
    assert torch.equal(weights[0].grad, weights[1].grad)  # type: ignore[arg-type]


def test_a_gradient_that_is_changed_in_place_does_not_reach_the_next_pass() -> None:
    """A hook of a node, and a script that changes `.grad`, may hold the gradient that a pass starts from."""
    grads = []
    for _ in range(3):
        weight = torch.ones((), requires_grad=True)
        loss = weight * 1
        loss.grad_fn.register_prehook(lambda given: given[0].mul_(2) and None)  # type: ignore[union-attr]
        run_backward(loss)
        run_backward(weight)  # the gradient itself
        grads.append(weight.grad.item())  # type: ignore[union-attr]
        weight.grad.mul_(7)  # type: ignore[union-attr]
    assert grads == [3.0] * 3


def test_fake_tensors_leave_nothing_behind() -> None:
    """A pass under `FakeTensorMode` computes nothing, and the next one does."""
    with FakeTensorMode():
        run_backward(torch.ones((), requires_grad=True) * 2)
    weight = torch.ones((), requires_grad=True)
    run_backward(weight * 2)
    assert type(weight.grad) is Tensor
    assert weight.grad.item() == 2.0
