"""Layer and RMS normalization of tensors: statistics in fp32 (fp64 for fp64 input), result in a dtype of choice.

Source: Apex 25.05, the functions of `apex.normalization.fused_layer_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ampcompare.apex._autocast_utils import _cast_if_autocast_enabled
from ampcompare.apex.normalization.autograd import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    FusedRMSNormFunction,
)

__all__ = [
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


def fused_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `input` with mean 0 and variance 1 over its last dimensions, in the input's dtype.

    Under autocast `input` is first cast to the autocast dtype, here and in the functions below.

    Args:
        normalized_shape: sizes of the dimensions to normalize over.
        memory_efficient: keep the output for backward instead of the input.
    """
    return _layer_norm(input, None, None, normalized_shape, eps, memory_efficient, mixed=False)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the normalized `input`, times `weight`, plus `bias` (both of `normalized_shape`), in the input's dtype.

    With `memory_efficient` the backward pass divides the output by `weight`: magnitudes of weights below `eps` count as
    `eps` there.
    """
    return _layer_norm(input, weight, bias, normalized_shape, eps, memory_efficient, mixed=False)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Do as `fused_layer_norm_affine`, with the result in the dtype of `weight`."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, memory_efficient, mixed=True)


def fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `input` divided by the root of its mean square over the last dimensions, in the input's dtype."""
    return _rms_norm(input, None, normalized_shape, eps, memory_efficient, mixed=False)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return what `fused_rms_norm` gives times `weight` (of `normalized_shape`), in the input's dtype."""
    return _rms_norm(input, weight, normalized_shape, eps, memory_efficient, mixed=False)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Do as `fused_rms_norm_affine`, with the result in the dtype of `weight`."""
    return _rms_norm(input, weight, normalized_shape, eps, memory_efficient, mixed=True)


def manual_rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMS norm written out: fp32 for low-precision input, or in the dtype of a low-precision `weight`.

    This is Apex's reference; the functions above are the ones to train with.
    """
    square = input.float().square().mean(tuple(range(-len(normalized_shape), 0)), keepdim=True)
    output = torch.rsqrt(square + eps) * input
    if weight is None:
        return output
    return weight * (output.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else output)


def _layer_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool,
    mixed: bool,
) -> Tensor:
    input, weight, bias = _cast_if_autocast_enabled(input, weight, bias)
    result = weight.dtype if mixed and weight is not None else input.dtype
    shape = list(normalized_shape)
    with torch.autocast(input.device.type, enabled=False):
        if memory_efficient:
            if weight is None:
                return FusedLayerNormFunction.apply(input, shape, eps, True)  # type: ignore[no-any-return, no-untyped-call]
            affine = FusedLayerNormAffineMixedDtypesFunction if mixed else FusedLayerNormAffineFunction
            return affine.apply(input, weight, bias, shape, eps, True)  # type: ignore[no-any-return, no-untyped-call]
        if _one_dtype(input, weight, bias, result):
            return F.layer_norm(input, shape, weight, bias, eps)
        wide = torch.promote_types(input.dtype, torch.float32)
        return F.layer_norm(input.to(wide), shape, _to(weight, wide), _to(bias, wide), eps).to(result)


def _rms_norm(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool,
    mixed: bool,
) -> Tensor:
    input, weight = _cast_if_autocast_enabled(input, weight)
    result = weight.dtype if mixed and weight is not None else input.dtype
    shape = list(normalized_shape)
    with torch.autocast(input.device.type, enabled=False):
        if memory_efficient:
            if weight is None:
                return FusedRMSNormFunction.apply(input, shape, eps, True)  # type: ignore[no-any-return, no-untyped-call]
            affine = FusedRMSNormAffineMixedDtypesFunction if mixed else FusedRMSNormAffineFunction
            return affine.apply(input, weight, shape, eps, True)  # type: ignore[no-any-return, no-untyped-call]
        wide = torch.promote_types(input.dtype, torch.float32)
        return F.rms_norm(input.to(wide), shape, _to(weight, wide), eps).to(result)


def _one_dtype(input: Tensor, weight: Tensor | None, bias: Tensor | None, result: torch.dtype) -> bool:
    return all(tensor is None or tensor.dtype is result for tensor in (input, weight, bias))


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
