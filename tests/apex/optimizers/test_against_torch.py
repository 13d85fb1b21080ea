"""Fused optimizers against `torch.optim`, where the two mean the same."""

import pytest
import torch
from torch import nn

from ampcompare.apex.optimizers import FusedAdam, FusedSGD


def model() -> nn.Sequential:
    # No bias before the batch norm: its gradient is rounding noise, which Adam would blow up.
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


def test_rows_of_different_strides_are_not_mixed_up() -> None:
    """A transposed or channels-last parameter with a contiguous gradient is updated element by element."""
    for layout in (lambda t: t.to(memory_format=torch.channels_last), lambda t: t.transpose(0, 3)):
        start = torch.arange(24.0).reshape(2, 3, 2, 2)
        param = nn.Parameter(layout(start.clone()))
        grad = torch.arange(24.0).reshape(param.shape)
        before = param.detach().clone()
        param.grad = grad
        FusedSGD([param], lr=0.5).step()
        torch.testing.assert_close(param.detach(), before - 0.5 * grad)
        param.grad = grad
        FusedAdam([param], lr=0.5).step()
        expected = before - 0.5 * grad - 0.5 * torch.sign(grad)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capturable,masters", [(False, False), (True, False), (True, True)])
def test_adam_under_a_grad_scaler(capturable: bool, masters: bool) -> None:
    """Under torch's GradScaler FusedAdam gives AdamW's weights, clean steps and overflows alike, without a warning."""
    ours, theirs = model(), model()
    optimizer = FusedAdam(ours.parameters(), lr=0.01, capturable=capturable, master_weights=masters)
    stock = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.0)
    scalers = []
    for network, used in ((ours, optimizer), (theirs, stock)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        generator = torch.Generator().manual_seed(1)
        for number in range(6):
            used.zero_grad()
            loss = network(torch.randn(3, 2, 4, 4, generator=generator)).square().mean()
            scaler.scale(loss * (float("inf") if number in (0, 3) else 1.0)).backward()
            if number == 4:
                scaler.unscale_(used)
            scaler.step(used)
            scaler.update()
        scalers.append(scaler.get_scale())
    assert scalers[0] == scalers[1]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    if capturable:
        assert optimizer.param_groups[0]["step"].tolist() == [4]


def test_capturable_adam_takes_a_scaler_by_keyword_and_unscales_the_gradients() -> None:
    """`step(grad_scaler=...)` divides the gradients by the scale in place, and an overflow changes nothing."""
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param], lr=0.1, capturable=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    optimizer.step(grad_scaler=scaler)
    assert param.grad.tolist() == [1.0, 1.0, 1.0]
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.9))
    param.grad = torch.tensor([float("inf"), 8.0, 8.0])
    optimizer.step(grad_scaler=scaler)
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.9))
    assert param.grad.tolist() == [float("inf"), 8.0, 8.0]
    assert optimizer.param_groups[0]["step"].tolist() == [1]
