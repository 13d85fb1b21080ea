"""Apex's compiled layer and RMS normalization by their names and argument order, in torch, for any device.

Statistics and arithmetic are fp32, fp64 for fp64 input; `mean` and `invvar` have that dtype and shape (n,), one number
for each row that is normalized. A backward function takes the input of its forward function, or with
`memory_efficient` the output: with y = x_hat * weight + bias, x_hat follows from y, and
dx = (d - mean(d) - x_hat * mean(d * x_hat)) * invvar, where d = dy * weight; without the term mean(d) for RMS.
Magnitudes of weights below `eps` count as `eps` where x_hat is recovered.

Source: Apex 25.05, the bindings of its module `fused_layer_norm_cuda`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "backward",
    "backward_affine",
    "forward",
    "forward_affine",
    "forward_affine_mixed_dtypes",
    "rms_backward",
    "rms_backward_affine",
    "rms_forward",
    "rms_forward_affine",
    "rms_forward_affine_mixed_dtypes",
]


def forward(input: Tensor, normalized_shape: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized input in its dtype, `mean` and `invvar`."""
    return _layer_norm(input, normalized_shape, None, None, eps, input.dtype)


def forward_affine(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized input times `weight` plus `bias` in the input's dtype, `mean` and `invvar`."""
    return _layer_norm(input, normalized_shape, weight, bias, eps, input.dtype)


def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `forward_affine` does, with the result in the dtype of `weight`."""
    return _layer_norm(input, normalized_shape, weight, bias, eps, weight.dtype)


def backward(
    grad_output: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the gradient of the input of `forward`, in the dtype of `input_or_output`."""
    x_hat = _x_hat(input_or_output, mean, invvar, None, None, normalized_shape, eps, memory_efficient)
    inner = grad_output.to(x_hat.dtype)
    return _through_norm(inner, x_hat, invvar, normalized_shape, centered=True).to(input_or_output.dtype)


def backward_affine(
    grad_output: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    bias: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input (in the dtype of `input_or_output`), weight and bias (in theirs)."""
    x_hat = _x_hat(input_or_output, mean, invvar, weight, bias, normalized_shape, eps, memory_efficient)
    grad = grad_output.to(x_hat.dtype)
    inner = grad * weight.to(x_hat.dtype)
    return (
        _through_norm(inner, x_hat, invvar, normalized_shape, centered=True).to(input_or_output.dtype),
        _over_rows(grad * x_hat, normalized_shape).to(weight.dtype),
        _over_rows(grad, normalized_shape).to(bias.dtype),
    )


def rms_forward(input: Tensor, normalized_shape: Sequence[int], eps: float) -> tuple[Tensor, Tensor]:
    """Return the input divided by its root mean square in its dtype, and `invvar`."""
    return _rms_norm(input, normalized_shape, None, eps, input.dtype)


def rms_forward_affine(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return what `rms_forward` gives times `weight` in the input's dtype, and `invvar`."""
    return _rms_norm(input, normalized_shape, weight, eps, input.dtype)


def rms_forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return what `rms_forward_affine` does, with the result in the dtype of `weight`."""
    return _rms_norm(input, normalized_shape, weight, eps, weight.dtype)


def rms_backward(
    grad_output: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the gradient of the input of `rms_forward`, in the dtype of `input_or_output`."""
    x_hat = _x_hat(input_or_output, None, invvar, None, None, normalized_shape, eps, memory_efficient)
    inner = grad_output.to(x_hat.dtype)
    return _through_norm(inner, x_hat, invvar, normalized_shape, centered=False).to(input_or_output.dtype)


def rms_backward_affine(
    grad_output: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input (in the dtype of `input_or_output`) and weight (in its own)."""
    x_hat = _x_hat(input_or_output, None, invvar, weight, None, normalized_shape, eps, memory_efficient)
    grad = grad_output.to(x_hat.dtype)
    inner = grad * weight.to(x_hat.dtype)
    return (
        _through_norm(inner, x_hat, invvar, normalized_shape, centered=False).to(input_or_output.dtype),
        _over_rows(grad * x_hat, normalized_shape).to(weight.dtype),
    )


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    result: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(input.dtype, torch.float32)
    output, mean, invvar = torch.native_layer_norm(
        input.to(wide),
        list(normalized_shape),
        None if weight is None else weight.to(wide),
        None if bias is None else bias.to(wide),
        eps,
    )
    return output.to(result), mean.reshape(-1), invvar.reshape(-1)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float, result: torch.dtype
) -> tuple[Tensor, Tensor]:
    values = input.to(torch.promote_types(input.dtype, torch.float32))
    invvar = torch.rsqrt(values.square().mean(_dims(normalized_shape), keepdim=True) + eps)
    output = values * invvar
    if weight is not None:
        output = output * weight.to(values.dtype)
    return output.to(result), invvar.reshape(-1)


def _x_hat(
    input_or_output: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool,
) -> Tensor:
    """Return the normalized input, from the input and its statistics or from the output and the parameters."""
    values = input_or_output.to(invvar.dtype)
    if not memory_efficient:
        if mean is not None:
            values = values - _per_row(mean, values, normalized_shape)
        return values * _per_row(invvar, values, normalized_shape)
    if bias is not None:
        values = values - bias.to(values.dtype)
    if weight is None:
        return values
    factor = weight.to(values.dtype)
    floor = torch.where(factor < 0, -eps, eps).to(factor.dtype)
    return values / torch.where(factor.abs() < eps, floor, factor)


def _through_norm(
    inner: Tensor, x_hat: Tensor, invvar: Tensor, normalized_shape: Sequence[int], *, centered: bool
) -> Tensor:
    dims = _dims(normalized_shape)
    along = x_hat * (inner * x_hat).mean(dims, keepdim=True)
    if centered:
        inner = inner - inner.mean(dims, keepdim=True)
    return (inner - along) * _per_row(invvar, x_hat, normalized_shape)


def _dims(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def _per_row(statistic: Tensor, values: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    rows = values.shape[: values.ndim - len(normalized_shape)]
    return statistic.reshape(*rows, *[1] * len(normalized_shape))


def _over_rows(grad: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    rows = tuple(range(grad.ndim - len(normalized_shape)))
    return grad.sum(rows) if rows else grad
