"""Packed tensors: how large, how far off, right in the mean, and true to shape, type and order of memory."""

import pytest
import torch

from ampcompare.training.precision.actnn import quantize


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_value_is_off_by_less_than_a_step(bits: int) -> None:
    """Every value lies within one step of its group from where it was; bytes are bits and two fp32 a group."""
    values = torch.randn(4096, generator=generator(1)) * torch.linspace(0.01, 100, 4096)
    packed = quantize(values, bits, 256, generator())
    groups = values.view(16, 256)
    steps = (groups.amax(1) - groups.amin(1)) / (2**bits - 1)
    off = (packed.restore().view(16, 256) - groups).abs()
    assert (off <= steps[:, None] * 1.0001).all()
    assert off.max() > 0
    assert packed.nbytes == 4096 * bits // 8 + 16 * 8


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_mean_of_many_roundings_is_the_value(bits: int) -> None:
    """Rounding at random has no bias: 400 packings average to the tensor, twenty times nearer than one does."""
    values = torch.randn(512, generator=generator(1))
    drawn = [quantize(values, bits, 256, generator(seed)).restore() for seed in range(400)]
    step = (values.max() - values.min()) / (2**bits - 1)
    assert (torch.stack(drawn).mean(0) - values).abs().max() < 0.15 * step
    assert (drawn[0] - values).abs().max() > 0.5 * step


@pytest.mark.parametrize("shape", [(1000,), (3, 5, 7), (1, 1), (257,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_shape_and_type_come_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.rand(shape, generator=generator(1)).to(dtype)
    restored = quantize(values, 8, 256, generator()).restore()
    assert (restored.shape, restored.dtype) == (values.shape, dtype)
    assert (restored.float() - values.float()).abs().max() < 1 / 200


def test_order_of_memory_comes_back() -> None:
    """channels_last stays channels_last, with every value at its place."""
    images = torch.rand(4, 8, 5, 5, generator=generator(1)).to(memory_format=torch.channels_last)
    restored = quantize(images, 8, 256, generator()).restore()
    assert restored.is_contiguous(memory_format=torch.channels_last)
    assert (restored - images).abs().max() < 1 / 200


def test_equal_values_are_exact() -> None:
    """A group without spread comes back as it was, zeros among them."""
    for value in (0.0, -3.25, 1e-30):
        values = torch.full((512,), value)
        assert torch.equal(quantize(values, 2, 256, generator()).restore(), values)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_not_finite(bad: float) -> None:
    """An overflow in a group cannot be lost: the group comes back as NaN, the others as they were."""
    values = torch.ones(512)
    values[3] = bad
    restored = quantize(values, 2, 256, generator()).restore()
    assert restored[:256].isnan().all()
    assert torch.equal(restored[256:], values[256:])
