"""The autograd functions behind the norms, which scripts call by `apply` as they do Apex's.

Each takes the arguments of the function of `ampcompare.apex.normalization.functional` that has its name, without
casting for autocast. Its backward pass keeps the input, or with `memory_efficient` the output, so that the memory of
the input can be freed.

Source: Apex 25.05, the classes of `apex.normalization.fused_layer_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompare.apex import fused_layer_norm_cuda as kernels

__all__ = [
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
]


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """Layer normalization with `weight` and `bias`; the result has the input's dtype."""

    _kernel: Callable[..., tuple[Tensor, Tensor, Tensor]] = staticmethod(kernels.forward_affine)

    @classmethod
    def _run(
        cls,
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool,
    ) -> Tensor:
        output, mean, invvar = cls._kernel(input, normalized_shape, weight, bias, eps)
        _note(ctx, input, normalized_shape, eps, memory_efficient)
        ctx.save_for_backward(output if memory_efficient else input, weight, bias, mean, invvar)
        return output

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Return the normalized input, times `weight`, plus `bias`."""
        return FusedLayerNormAffineFunction._run(ctx, input, weight, bias, normalized_shape, eps, memory_efficient)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return gradients of `input`, `weight` and `bias`, each in the dtype of its tensor."""
        kept, weight, bias, mean, invvar = ctx.saved_tensors
        grad_input, grad_weight, grad_bias = kernels.backward_affine(
            grad_output, mean, invvar, kept, ctx.normalized_shape, weight, bias, ctx.eps, ctx.memory_efficient
        )
        return grad_input.to(ctx.input_dtype), grad_weight, grad_bias, None, None, None


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """Layer normalization with `weight` and `bias`; the result has the dtype of `weight`."""

    _kernel = staticmethod(kernels.forward_affine_mixed_dtypes)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Return the normalized input, times `weight`, plus `bias`."""
        run = FusedLayerNormAffineMixedDtypesFunction._run
        return run(ctx, input, weight, bias, normalized_shape, eps, memory_efficient)


class FusedLayerNormFunction(torch.autograd.Function):
    """Layer normalization without parameters."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, normalized_shape: Sequence[int], eps: float, memory_efficient: bool = False
    ) -> Tensor:
        """Return the normalized input."""
        output, mean, invvar = kernels.forward(input, normalized_shape, eps)
        _note(ctx, input, normalized_shape, eps, memory_efficient)
        ctx.save_for_backward(output if memory_efficient else input, mean, invvar)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return the gradient of `input`."""
        kept, mean, invvar = ctx.saved_tensors
        grad = kernels.backward(grad_output, mean, invvar, kept, ctx.normalized_shape, ctx.eps, ctx.memory_efficient)
        return grad, None, None, None


class FusedRMSNormAffineFunction(torch.autograd.Function):
    """RMS normalization with `weight`; the result has the input's dtype."""

    _kernel: Callable[..., tuple[Tensor, Tensor]] = staticmethod(kernels.rms_forward_affine)

    @classmethod
    def _run(
        cls,
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool,
    ) -> Tensor:
        output, invvar = cls._kernel(input, normalized_shape, weight, eps)
        _note(ctx, input, normalized_shape, eps, memory_efficient)
        ctx.save_for_backward(output if memory_efficient else input, weight, invvar)
        return output

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Return the normalized input, times `weight`."""
        return FusedRMSNormAffineFunction._run(ctx, input, weight, normalized_shape, eps, memory_efficient)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return gradients of `input` and `weight`, each in the dtype of its tensor."""
        kept, weight, invvar = ctx.saved_tensors
        grad_input, grad_weight = kernels.rms_backward_affine(
            grad_output, invvar, kept, ctx.normalized_shape, weight, ctx.eps, ctx.memory_efficient
        )
        return grad_input.to(ctx.input_dtype), grad_weight, None, None, None


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """RMS normalization with `weight`; the result has the dtype of `weight`."""

    _kernel = staticmethod(kernels.rms_forward_affine_mixed_dtypes)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Return the normalized input, times `weight`."""
        return FusedRMSNormAffineMixedDtypesFunction._run(ctx, input, weight, normalized_shape, eps, memory_efficient)


class FusedRMSNormFunction(torch.autograd.Function):
    """RMS normalization without parameters."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, normalized_shape: Sequence[int], eps: float, memory_efficient: bool = False
    ) -> Tensor:
        """Return the normalized input."""
        output, invvar = kernels.rms_forward(input, normalized_shape, eps)
        _note(ctx, input, normalized_shape, eps, memory_efficient)
        ctx.save_for_backward(output if memory_efficient else input, invvar)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return the gradient of `input`."""
        kept, invvar = ctx.saved_tensors
        grad = kernels.rms_backward(grad_output, invvar, kept, ctx.normalized_shape, ctx.eps, ctx.memory_efficient)
        return grad, None, None, None


def _note(ctx: Any, input: Tensor, normalized_shape: Sequence[int], eps: float, memory_efficient: bool) -> None:
    ctx.normalized_shape = tuple(normalized_shape)
    ctx.eps = eps
    ctx.memory_efficient = memory_efficient
    ctx.input_dtype = input.dtype
