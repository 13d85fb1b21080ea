"""Matrices that reach every branch of rounding with shared scales, without a random generator."""

import torch
from torch import Tensor


def hashed(rows: int, columns: int, salt: int) -> Tensor:
    """Return whole numbers below 2^31 that look random, the same on every machine."""
    x = torch.arange(rows * columns, dtype=torch.int64).view(rows, columns) + (salt << 32)
    for factor in (0x9E3779B1, 0x85EBCA6B):
        x = ((x ^ (x >> 15)) * factor) & 0xFFFFFFFF
    return (x ^ (x >> 13)) & 0x7FFFFFFF


def bell(rows: int, columns: int, salt: int) -> Tensor:
    """Return fp32 numbers with mean 0 and deviation 1: sums of twelve fractions."""
    parts = [hashed(rows, columns, salt + each).double() / 2**31 for each in range(12)]
    return (sum(parts[1:], parts[0]) - 6).float()


def make_matrices(rows: int, columns: int) -> dict[str, Tensor]:
    """Return fp32 matrices by kind; those named bf16 have values of bf16."""
    normal = bell(rows, columns, 1)
    spread = torch.exp2((hashed(rows, columns, 20) % 24 - 12).float())
    powers = torch.exp2((hashed(rows, columns, 30) % 200 - 100).float())
    bits = hashed(rows, columns, 40).to(torch.int32).view(torch.float32)
    outlier = torch.cat([normal[:, 16:] * 2.0**-20, normal[:, :16]], 1)
    return {
        "bf16": normal.bfloat16().float(),
        "wide bf16": (normal * spread).bfloat16().float(),
        "outliers bf16": outlier.bfloat16().float(),
        "fp32": normal * spread,
        "any fp32": torch.where(bits.isfinite(), bits, 1.0) * normal.sign(),
        "powers of two": powers,
        "ends of binades": torch.where(normal > 0, powers * 1.75, powers * 1.5),
        "zeros": torch.zeros(rows, columns),
    }
