"""Modules for layer and RMS normalization, and (for imports written for Apex) the functions they call.

They have the arithmetic and dtypes of `functional`, without the memory-efficient form: TorchScript has no autograd
functions. Autocast is left to TorchScript's own pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcompare.apex import fused_layer_norm_cuda
from ampcompare.apex.normalization.functional import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    FusedRMSNormFunction,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_layer_norm_cuda",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


class _Norm(nn.Module):
    if TYPE_CHECKING:  # torch.jit.script refuses the type of a parameter that may be None
        weight: nn.Parameter | None
        normalized_shape: Any
    _own_parameters: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape = torch.Size(sizes)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name in self._own_parameters:
            self.register_parameter(name, nn.Parameter(torch.empty(sizes)) if elementwise_affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        """Return the arguments in the module's repr."""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(_Norm):
    """Layer normalization over the last dimensions; the output has the input's dtype.

    Args:
        normalized_shape: sizes of those dimensions; an int means the last one.
        elementwise_affine: own `weight` (ones) and `bias` (zeros) of that shape; else both are None.
        memory_efficient: keep the output for backward instead of the input.

    Works on any device, and needs no compiled extension.
    """

    if TYPE_CHECKING:
        bias: nn.Parameter | None
    _own_parameters = ("weight", "bias")

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in its dtype."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return _scripted_layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps, False)
        else:  # the compiler leaves out this branch, and only this form of it
            if self.weight is None or self.bias is None:
                return fused_layer_norm(input, self.normalized_shape, self.eps, self.memory_efficient)
            return fused_layer_norm_affine(
                input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
            )


class FusedRMSNorm(_Norm):
    """RMS normalization over the last dimensions; arguments and dtypes as for `FusedLayerNorm`, without `bias`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in its dtype."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return _scripted_rms_norm(input, self.weight, self.normalized_shape, self.eps, False)
        else:
            if self.weight is None:
                return fused_rms_norm(input, self.normalized_shape, self.eps, self.memory_efficient)
            return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps, self.memory_efficient)


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer normalization whose output has the dtype of its parameters; always affine.

    Raises:
        RuntimeError: `elementwise_affine=False`; `True` only warns, and other unknown keywords are ignored, as in Apex.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        _refuse_non_affine("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in the dtype of `weight`."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return _scripted_layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps, True)
        else:
            assert self.weight is not None
            assert self.bias is not None
            return mixed_dtype_fused_layer_norm_affine(
                input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
            )


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMS normalization whose output has the dtype of its weight; arguments as for `MixedFusedLayerNorm`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        _refuse_non_affine("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in the dtype of `weight`."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return _scripted_rms_norm(input, self.weight, self.normalized_shape, self.eps, True)
        else:
            assert self.weight is not None
            return mixed_dtype_fused_rms_norm_affine(
                input, self.weight, self.normalized_shape, self.eps, self.memory_efficient
            )


def _refuse_non_affine(name: str, kwargs: dict[str, Any]) -> None:
    if "elementwise_affine" not in kwargs:
        return
    warnings.warn(f"{name} is always affine: leave elementwise_affine out", stacklevel=3)
    if not kwargs["elementwise_affine"]:
        raise RuntimeError(f"{name} got elementwise_affine=False, but it is always affine; use the class without Mixed")


def _scripted_layer_norm(
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


def _scripted_rms_norm(
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
