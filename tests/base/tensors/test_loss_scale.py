"""The rule of a dynamic loss scale: on the host, on a device, and in torch's GradScaler."""

import math
import random

import pytest
import torch

from ampcompare.base.tensors.loss_scale import (
    DeviceLossScale,
    is_loss_scale_exact_on_device,
    next_scale_and_good_steps,
)


def test_one_step() -> None:
    """An overflow shrinks the scale and starts the count again; growth waits for a whole interval."""
    assert next_scale_and_good_steps(8.0, 5, overflow=True, growth_interval=2) == (4.0, 0)
    assert next_scale_and_good_steps(8.0, 0, overflow=False, growth_interval=2) == (8.0, 1)
    assert next_scale_and_good_steps(8.0, 1, overflow=False, growth_interval=2) == (16.0, 0)
    factors = {"growth_factor": 1.5, "backoff_factor": 0.25}
    assert next_scale_and_good_steps(8.0, 1, overflow=False, growth_interval=2, **factors) == (12.0, 0)
    assert next_scale_and_good_steps(8.0, 1, overflow=True, growth_interval=2, **factors) == (2.0, 0)


def test_a_bound_holds_in_its_own_direction() -> None:
    """A scale above the ceiling stays there until it shrinks, and one below the floor until it grows."""
    bounds = {"growth_interval": 1, "min_scale": 4.0, "max_scale": 16.0}
    assert next_scale_and_good_steps(4.0, 0, overflow=True, **bounds) == (4.0, 0)
    assert next_scale_and_good_steps(16.0, 0, overflow=False, **bounds) == (16.0, 0)
    assert next_scale_and_good_steps(64.0, 0, overflow=True, **bounds) == (32.0, 0)
    assert next_scale_and_good_steps(1.0, 0, overflow=False, **bounds) == (2.0, 0)
    assert next_scale_and_good_steps(1.0, 0, overflow=True, growth_interval=1, min_scale=0) == (0.5, 0)


@pytest.mark.parametrize(("min_scale", "max_scale"), [(None, math.inf), (1.0, math.inf), (2.0**13, 2.0**18)])
def test_host_and_device_move_alike(min_scale: float | None, max_scale: float) -> None:
    """After each of 400 random steps the device holds the host's scale, its inverse and the count."""
    draw = random.Random(0)
    scale, good_steps = 2.0**16, 0
    device = DeviceLossScale(torch.device("cpu"))
    device.set_scale_and_good_steps(scale, good_steps)
    for step in range(400):
        overflow = draw.random() < (0.6 if step < 60 else 0.1)
        bounds = {"min_scale": min_scale, "max_scale": max_scale}
        scale, good_steps = next_scale_and_good_steps(
            scale, good_steps, overflow=overflow, growth_interval=4, **bounds
        )
        device.update(torch.tensor(float(overflow)), 4, min_scale, max_scale)
        assert device.read_scale_and_good_steps() == (scale, good_steps)
        assert device.inverse.item() == 1 / scale


def test_bounds_decide_what_a_device_can_hold() -> None:
    """Without a ceiling any power of two with an exact inverse can be held."""
    assert is_loss_scale_exact_on_device(2.0**16)
    assert is_loss_scale_exact_on_device(2.0**16, 0, 2.0**24)
    assert not is_loss_scale_exact_on_device(2.0**25, None, 2.0**24)
    assert not is_loss_scale_exact_on_device(2.0**16, None, None)
    assert not is_loss_scale_exact_on_device(2.0**16, 2.0**17)
    assert not is_loss_scale_exact_on_device(3.0)
    assert not is_loss_scale_exact_on_device(2.0**-127)
