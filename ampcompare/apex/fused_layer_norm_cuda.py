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


def forward(input: Tensor, normalized_shape: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized input in its dtype, `mean` and `invvar`."""
    return _layer_norm_and_statistics(input, normalized_shape, None, None, eps, input.dtype)


def forward_affine(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized input times `weight` plus `bias` in the input's dtype, `mean` and `invvar`."""
    return _layer_norm_and_statistics(input, normalized_shape, weight, bias, eps, input.dtype)


def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `forward_affine` does, with the result in the dtype of `weight`."""
    return _layer_norm_and_statistics(input, normalized_shape, weight, bias, eps, weight.dtype)


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
    params = (None, None, eps, memory_efficient)
    return _gradients_of_norm(
        grad_output, mean, invvar, input_or_output, normalized_shape, *params, centered=True
    )[0]


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
) -> tuple[Tensor, ...]:
    """Return the gradients of input (in the dtype of `input_or_output`), weight and bias (in theirs)."""
    params = (weight, bias, eps, memory_efficient)
    return _gradients_of_norm(
        grad_output, mean, invvar, input_or_output, normalized_shape, *params, centered=True
    )


def rms_forward(input: Tensor, normalized_shape: Sequence[int], eps: float) -> tuple[Tensor, Tensor]:
    """Return the input divided by its root mean square in its dtype, and `invvar`."""
    return _rms_norm_and_statistic(input, normalized_shape, None, eps, input.dtype)


def rms_forward_affine(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return what `rms_forward` gives times `weight` in the input's dtype, and `invvar`."""
    return _rms_norm_and_statistic(input, normalized_shape, weight, eps, input.dtype)


def rms_forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return what `rms_forward_affine` does, with the result in the dtype of `weight`."""
    return _rms_norm_and_statistic(input, normalized_shape, weight, eps, weight.dtype)


def rms_backward(
    grad_output: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the gradient of the input of `rms_forward`, in the dtype of `input_or_output`."""
    params = (None, None, eps, memory_efficient)
    return _gradients_of_norm(
        grad_output, None, invvar, input_or_output, normalized_shape, *params, centered=False
    )[0]


def rms_backward_affine(
    grad_output: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, ...]:
    """Return the gradients of input (in the dtype of `input_or_output`) and weight (in its own)."""
    params = (weight, None, eps, memory_efficient)
    return _gradients_of_norm(
        grad_output, None, invvar, input_or_output, normalized_shape, *params, centered=False
    )


def _layer_norm_and_statistics(
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


def _rms_norm_and_statistic(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float, result: torch.dtype
) -> tuple[Tensor, Tensor]:
    values = input.to(torch.promote_types(input.dtype, torch.float32))
    invvar = torch.rsqrt(values.square().mean(_normalized_dims(normalized_shape), keepdim=True) + eps)
    output = values * invvar
    if weight is not None:
        output = output * weight.to(values.dtype)
    return output.to(result), invvar.reshape(-1)


def _normalized_input(
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
            values = values - _statistic_per_row(mean, values, normalized_shape)
        return values * _statistic_per_row(invvar, values, normalized_shape)
    if bias is not None:
        values = values - bias.to(values.dtype)
    if weight is None:
        return values
    factor = weight.to(values.dtype)
    floor = torch.where(factor < 0, -eps, eps).to(factor.dtype)
    return values / torch.where(factor.abs() < eps, floor, factor)


def _gradients_of_norm(
    grad_output: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    memory_efficient: bool,
    *,
    centered: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of the input and of the parameters that there are."""
    x_hat = _normalized_input(
        input_or_output, mean, invvar, weight, bias, normalized_shape, eps, memory_efficient
    )
    grad, dims = grad_output.to(x_hat.dtype), _normalized_dims(normalized_shape)
    inner = grad if weight is None else grad * weight.to(x_hat.dtype)
    along = x_hat * (inner * x_hat).mean(dims, keepdim=True)
    if centered:
        inner = inner - inner.mean(dims, keepdim=True)
    gradients = [
        ((inner - along) * _statistic_per_row(invvar, x_hat, normalized_shape)).to(input_or_output.dtype)
    ]
    if weight is not None:
        gradients.append(_sum_over_rows(grad * x_hat, normalized_shape).to(weight.dtype))
    if bias is not None:
        gradients.append(_sum_over_rows(grad, normalized_shape).to(bias.dtype))
    return tuple(gradients)


def _normalized_dims(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def _statistic_per_row(statistic: Tensor, values: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    rows = values.shape[: values.ndim - len(normalized_shape)]
    return statistic.reshape(*rows, *[1] * len(normalized_shape))


def _sum_over_rows(grad: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    rows = tuple(range(grad.ndim - len(normalized_shape)))
    return grad.sum(rows) if rows else grad
