"""Tensors in 2, 4 or 8 bits: groups of values with a minimum and a step each, rounded stochastically (unbiased).

Source: ActNN (Chen et al. 2021), per-group quantization with stochastic rounding; written here in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Quantized", "quantize"]


@dataclass(frozen=True)
class Quantized:
    """A tensor of floating point, packed.

    Attributes:
        codes: uint8; `8 // bits` values in each byte, padded to whole groups.
        lows, steps: fp32, of each group: value = low + code * step.
        shape, dtype: of the tensor.
        channels_last: whether its memory format is that one.
    """

    codes: Tensor
    lows: Tensor
    steps: Tensor
    bits: int
    shape: torch.Size
    dtype: torch.dtype
    channels_last: bool

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.codes.nbytes + self.lows.nbytes + self.steps.nbytes

    def restore(self) -> Tensor:
        """Return the tensor; each value differs by less than a step of its group."""
        codes = self.codes
        if self.bits < 8:
            shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=codes.device)
            codes = (codes[:, :, None] >> shifts) & (2**self.bits - 1)
        values = torch.addcmul(self.lows[:, None], codes.flatten(1).float(), self.steps[:, None])
        flat = values.flatten()[: self.shape.numel()].to(self.dtype)
        if not self.channels_last:
            return flat.view(self.shape)
        batch, channels, height, width = self.shape
        return flat.view(batch, height, width, channels).permute(0, 3, 1, 2)


def quantize(tensor: Tensor, bits: int, group: int, generator: torch.Generator) -> Quantized:
    """Pack a floating-point tensor; a group with an infinity or a NaN is restored as NaN.

    Args:
        tensor: of any shape.
        bits: 2, 4 or 8.
        group: values that share a minimum and a step, a multiple of 4.
        generator: of the tensor's device, for the rounding.
    """
    channels_last = (
        tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    flat = (tensor.permute(0, 2, 3, 1) if channels_last else tensor).reshape(-1).float()
    missing = -len(flat) % group
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    groups = flat.view(-1, group)
    lows, highs = groups.aminmax(dim=1)
    highest = 2**bits - 1
    steps = (highs - lows) / highest
    divisors = steps.clamp(min=torch.finfo(torch.float32).tiny)  # a group of equal values has a step of 0
    noise = torch.rand(groups.shape, generator=generator, device=groups.device)
    codes = ((groups - lows[:, None]) / divisors[:, None]).add_(noise).nan_to_num_(0.0).clamp_(0, highest)
    packed = codes.to(torch.uint8)
    if bits < 8:
        parts = packed.view(len(packed), -1, 8 // bits)
        packed = parts[..., 0].clone()
        for index in range(1, 8 // bits):
            packed |= parts[..., index] << (index * bits)
    return Quantized(packed, lows, steps, bits, tensor.shape, tensor.dtype, channels_last)
