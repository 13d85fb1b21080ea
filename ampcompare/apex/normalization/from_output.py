"""Normalization whose backward pass needs the output and not the input, so that the input's memory can be freed.

With y = x_hat * weight + bias known, x_hat follows from y, and the gradient of x needs only x_hat and 1/sigma:
dx = (d - mean(d) - x_hat * mean(d * x_hat)) / sigma, where d = dy * weight; without the term mean(d) for RMS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["LayerNormFromOutput", "RMSNormFromOutput"]


class LayerNormFromOutput(torch.autograd.Function):
    """Layer normalization that saves its output; see `fused_layer_norm_affine`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        normalized_shape: list[int],
        eps: float,
        result: torch.dtype,
    ) -> Tensor:
        """Return the normalized input in dtype `result`."""
        wide = torch.promote_types(input.dtype, torch.float32)
        output, _, inverse_deviation = torch.native_layer_norm(
            input.to(wide),
            normalized_shape,
            None if weight is None else weight.to(wide),
            None if bias is None else bias.to(wide),
            eps,
        )
        output = output.to(result)
        ctx.save_for_backward(output, weight, bias, inverse_deviation)
        _remember(ctx, input, normalized_shape, eps, wide)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return gradients for `input`, `weight` and `bias`, each in the dtype of its tensor."""
        output, weight, bias, inverse_deviation = ctx.saved_tensors
        grad = grad_output.to(ctx.wide)
        x_hat = output.to(ctx.wide)
        if bias is not None:
            x_hat = x_hat - bias.to(ctx.wide)
        x_hat, inner, grad_weight = _through_weight(ctx, x_hat, weight, grad)
        centered = inner - inner.mean(ctx.dims, keepdim=True)
        grad_input = (centered - x_hat * (inner * x_hat).mean(ctx.dims, keepdim=True)) * inverse_deviation
        grad_bias = None if bias is None else _over_batch(ctx, grad).to(bias.dtype)
        return grad_input.to(ctx.input_dtype), grad_weight, grad_bias, None, None, None


class RMSNormFromOutput(torch.autograd.Function):
    """RMS normalization that saves its output; see `fused_rms_norm_affine`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, normalized_shape: list[int], eps: float, result: torch.dtype
    ) -> Tensor:
        """Return the normalized input in dtype `result`."""
        wide = torch.promote_types(input.dtype, torch.float32)
        _remember(ctx, input, normalized_shape, eps, wide)
        values = input.to(wide)
        inverse_root = torch.rsqrt(values.square().mean(ctx.dims, keepdim=True) + eps)
        output = values * inverse_root
        if weight is not None:
            output = output * weight.to(wide)
        output = output.to(result)
        ctx.save_for_backward(output, weight, inverse_root)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return gradients for `input` and `weight`, each in the dtype of its tensor."""
        output, weight, inverse_root = ctx.saved_tensors
        x_hat, inner, grad_weight = _through_weight(ctx, output.to(ctx.wide), weight, grad_output.to(ctx.wide))
        grad_input = (inner - x_hat * (inner * x_hat).mean(ctx.dims, keepdim=True)) * inverse_root
        return grad_input.to(ctx.input_dtype), grad_weight, None, None, None


def _remember(ctx: Any, input: Tensor, normalized_shape: list[int], eps: float, wide: torch.dtype) -> None:
    ctx.dims = tuple(range(-len(normalized_shape), 0))
    ctx.batch_dims = tuple(range(input.ndim - len(normalized_shape)))
    ctx.eps = eps
    ctx.wide = wide
    ctx.input_dtype = input.dtype


def _through_weight(
    ctx: Any, scaled: Tensor, weight: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the input as normalized, the gradient that reaches it, and the gradient of `weight`."""
    if weight is None:
        return scaled, grad, None
    factor = weight.to(ctx.wide)
    small = factor.abs() < ctx.eps
    x_hat = scaled / torch.where(small, torch.where(factor < 0, -ctx.eps, ctx.eps).to(factor.dtype), factor)
    return x_hat, grad * factor, _over_batch(ctx, grad * x_hat).to(weight.dtype)


def _over_batch(ctx: Any, grad: Tensor) -> Tensor:
    return grad.sum(ctx.batch_dims) if ctx.batch_dims else grad
