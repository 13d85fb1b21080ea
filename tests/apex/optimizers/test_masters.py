"""FusedSGD with fp32 masters, driven through the names that amp keeps on an optimizer."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ampcompare.apex.optimizers import FusedSGD


def prepared(materialize: bool) -> tuple[FusedSGD, nn.Parameter, nn.Parameter, nn.Parameter]:
    """An optimizer over one fp16 and one fp32 parameter as amp leaves it: (optimizer, fp16, master, fp32)."""
    half = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16))
    single = nn.Parameter(torch.tensor([4.0, 5.0]))
    optimizer = FusedSGD([half, single], lr=0.1, momentum=0.5, materialize_master_grads=materialize)
    master = nn.Parameter(half.detach().float())
    optimizer.param_groups[0]["params"][0] = master
    optimizer._amp_stash = SimpleNamespace(  # type: ignore[attr-defined]
        fp16_groups=[[half]], fp32_from_fp16_groups=[[master]], fp32_from_fp32_groups=[[single]]
    )
    return optimizer, half, master, single


@pytest.mark.parametrize("materialize", [True, False])
def test_masters_and_model_weights_move_together(materialize: bool) -> None:
    """Masters, momentum and fp16 weights follow SGD, whether gradients are unscaled masters' or scaled model's."""
    optimizer, half, master, single = prepared(materialize)
    scale = 1.0 if materialize else 8.0
    expected, momentum = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
    for number in range(3):
        grad = torch.tensor([0.5, -0.25, 1.0])
        if materialize:
            master.grad = grad.clone()
        else:
            half.grad = (grad * scale).half()
        single.grad = torch.ones(2) * scale
        optimizer.most_recent_scale = scale
        optimizer.scale_set_by_backward = True
        optimizer.step()
        momentum = grad if number == 0 else 0.5 * momentum + grad
        expected = expected - 0.1 * momentum
        torch.testing.assert_close(master.detach(), expected)
        assert torch.equal(half.detach(), master.detach().half())
        assert optimizer.most_recent_scale == 1.0
        assert optimizer.scale_set_by_backward is False
        if not materialize:
            assert half.grad is not None
            assert torch.equal(half.grad, (grad * scale).half())
    torch.testing.assert_close(single.detach(), torch.tensor([4.0, 5.0]) - 0.1 * (1 + 1.5 + 1.75))
    assert optimizer.state[master]["momentum_buffer"].dtype is torch.float32
    assert half not in optimizer.state


@pytest.mark.parametrize("materialize", [True, False])
def test_a_master_without_gradient_stands_still(materialize: bool) -> None:
    """Where no loss reached a parameter, neither its master nor its fp16 weight changes."""
    optimizer, half, master, single = prepared(materialize)
    single.grad = torch.ones(2)
    optimizer.step()
    assert half.tolist() == master.tolist() == [1.0, 2.0, 3.0]
    assert "momentum_buffer" not in optimizer.state[master]
