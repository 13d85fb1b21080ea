"""The norms in the subset of Python that `torch.jit.script` compiles.

They have the arithmetic and dtypes of `functional`, without the memory-efficient form: TorchScript has no autograd
functions. Autocast is left to TorchScript's own pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["scripted_layer_norm", "scripted_rms_norm"]


def scripted_layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, normalized_shape: list[int], eps: float, mixed: bool
) -> Tensor:
    """Return the layer norm of `input` in its dtype, or with `mixed` in the dtype of `weight`."""
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    result = input.dtype
    if weight is not None:
        if mixed:
            result = weight.dtype
        weight = weight.to(wide)
    if bias is not None:
        bias = bias.to(wide)
    return F.layer_norm(input.to(wide), normalized_shape, weight, bias, eps).to(result)


def scripted_rms_norm(
    input: Tensor, weight: Tensor | None, normalized_shape: list[int], eps: float, mixed: bool
) -> Tensor:
    """Return the RMS norm of `input` in its dtype, or with `mixed` in the dtype of `weight`."""
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    result = input.dtype
    if weight is not None:
        if mixed:
            result = weight.dtype
        weight = weight.to(wide)
    return torch.rms_norm(input.to(wide), normalized_shape, weight, eps).to(result)
