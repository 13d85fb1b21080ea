"""Loss scalers: their constants, their methods for callers of Apex, and their private fields."""

import math

import torch

from ampcompare.apex import amp
from ampcompare.apex.amp.scaler import LossScaler
from tests.apex.amp.small_net import backward, start


def test_scaler_constants() -> None:
    """Window 2000, factor 2 both ways, floor when halving only, ceiling at start and when growing (deviation 25)."""
    scaler = LossScaler("dynamic", scale_factor=10.0)
    for _ in range(1999):
        assert scaler.update_scale() is False
    assert (scaler.loss_scale(), scaler._unskipped) == (65536.0, 1999)
    scaler.update_scale()
    assert (scaler.loss_scale(), scaler._unskipped) == (131072.0, 0)
    scaler = LossScaler("dynamic", min_loss_scale=100000.0)
    assert scaler.loss_scale() == 65536.0
    scaler._has_overflow = True
    assert scaler.update_scale() is True
    assert scaler.loss_scale() == 100000.0
    scaler = LossScaler("dynamic", max_loss_scale=1024.0, scale_window=1)
    assert scaler.loss_scale() == 1024.0
    scaler._loss_scale = 4096.0
    scaler.update_scale()
    assert scaler.loss_scale() == 1024.0
    static = LossScaler(8.0)
    static.update_scale()
    assert (static.loss_scale(), static._unskipped, static.dynamic) == (8.0, 1, False)


def test_scaler_methods_for_callers_of_apex() -> None:
    """unscale and unscale_with_stashed work on plain lists, and honor an overflow flag set by a user's kernel."""
    scaler = LossScaler("dynamic")
    scaler._loss_scale = 4.0
    half, master = [torch.full((2,), 8.0).half()], [torch.zeros(2)]
    scaler.unscale(half, master, 4.0)
    assert master[0].tolist() == [2.0, 2.0]
    scaler.unscale_with_stashed(half, [torch.ones(2)], master)
    assert master[0].tolist() == [3.0, 3.0]
    scaler.unscale_with_stashed(half, [torch.ones(2)], master, scale_override=(8.0, 1.0, 2.0))
    assert master[0].tolist() == [4.0, 4.0]
    assert scaler.loss_scale() == 4.0
    scaler._overflow_buf.fill_(1)
    assert scaler.update_scale() is True
    scaler.clear_overflow_state()
    assert scaler.update_scale() is False


def test_a_scale_near_zero() -> None:
    """An endless overflow never crashes: gradients stay NaN, the scale goes on falling."""
    model, optimizer = start("O2")
    scaler = amp._amp_state.loss_scalers[0]
    for scale in (2.0**-140, 5e-324, 0.0):
        scaler._loss_scale = scale
        backward(model, optimizer, math.nan)
        assert scaler.loss_scale() == scale / 2
        optimizer.step()


def test_private_fields_are_live() -> None:
    """Scripts set `_loss_scale` and `_scale_seq_len`; the next block uses them."""
    _, optimizer = start("O2")
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale, scaler._scale_seq_len = 2.0**20, 1
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert scaled.item() == 2.0**20
    assert scaler.loss_scale() == 2.0**21
