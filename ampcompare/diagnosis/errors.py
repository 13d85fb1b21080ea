"""How far a result is from the same one of the wide run: norms, with few passes over the values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["errors_of"]

CHUNK = 2**17  # elements whose difference stays in the cache of a core
MIN_SQUARE = 1e-30  # of sums in fp32: what is below has lost digits


def errors_of(result: Tensor, exact: Tensor, own: Tensor | None) -> Any:
    """Return what errors are computed from: norms of the difference, the wide result, the own difference, the result.

    Args:
        exact: the result of the wide run, fp32 or float64, of the shape of `result`.
        own: the result of the operation alone in the wide type; None if unknown, and its norm is 0.

    Returns:
        (4,) floats for tensors on the host; a float64 tensor on another device, unread.
    """
    flat, wide = result.detach().reshape(-1), exact.detach().reshape(-1)
    alone = None if own is None or own.numel() != flat.numel() else own.detach().reshape(-1)
    if flat.device.type != "cpu":
        return _device_norms(flat.to(wide.dtype), wide, alone)
    if len(flat) <= CHUNK:
        return tuple(map(math.sqrt, _squares(flat, wide, alone)))
    squares = [0.0] * 4
    for begin in range(0, len(flat), CHUNK):
        part = slice(begin, begin + CHUNK)
        added = _squares(flat[part], wide[part], None if alone is None else alone[part])
        squares = [total + one for total, one in zip(squares, added, strict=True)]
    return tuple(map(math.sqrt, squares))


def _squares(flat: Tensor, wide: Tensor, own: Tensor | None) -> list[float]:
    """Return the sums of squares of a part on the host."""
    values = flat.to(wide.dtype, copy=True)
    of_values, of_wide = _square(values), _square(wide)
    of_own = 0.0 if own is None else _square(values - own)
    return [_square(values.sub_(wide)), of_wide, of_own, of_values]  # in place, which takes no memory


def _square(part: Tensor) -> float:
    array = part.numpy()
    with np.errstate(all="ignore"):
        total = float(array.dot(array))
    if part.dtype is torch.float64 or MIN_SQUARE < total < math.inf:
        return total
    double = part.double()  # too large or too small for squares in fp32
    return float(torch.dot(double, double))


def _device_norms(values: Tensor, wide: Tensor, own: Tensor | None) -> Tensor:
    norm = torch.ops.aten.linalg_vector_norm.default
    alone = values.new_zeros(()) if own is None else norm(values - own)
    return torch.stack([norm(values - wide), norm(wide), alone, norm(values)]).double()
