"""`FusedDense` and `FusedDenseGeluDense`, on torch's own linear layer and GELU.

The weights are left uninitialized, as by Apex: fill them before use.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcompare.apex._autocast_utils import _cast_if_autocast_enabled


class FusedDenseFunc:
    """Linear layer with bias, called by `apply`."""

    @staticmethod
    def apply(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return `input @ weight.T + bias`."""
        return F.linear(input, weight, bias)


class DenseNoBiasFunc:
    """Linear layer without bias, called by `apply`."""

    @staticmethod
    def apply(input: Tensor, weight: Tensor) -> Tensor:
        """Return `input @ weight.T`."""
        return F.linear(input, weight)


class FusedDenseGeluDenseFunc:
    """Linear layer, GELU, linear layer, called by `apply`."""

    @staticmethod
    def apply(input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
        """Return the output of the second layer; GELU is the tanh approximation, which cuBLASLt fuses."""
        return F.linear(F.gelu(F.linear(input, weight1, bias1), approximate="tanh"), weight2, bias2)


def _fused_dense(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    args = _cast_if_autocast_enabled(input, weight, bias)
    with torch.autocast(input.device.type, enabled=False):
        return FusedDenseFunc.apply(*args)


def _dense_no_bias(input: Tensor, weight: Tensor) -> Tensor:
    args = _cast_if_autocast_enabled(input, weight)
    with torch.autocast(input.device.type, enabled=False):
        return DenseNoBiasFunc.apply(*args)


def _fused_dense_gelu_dense(
    input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> Tensor:
    args = _cast_if_autocast_enabled(input, weight1, bias1, weight2, bias2)
    with torch.autocast(input.device.type, enabled=False):
        return FusedDenseGeluDenseFunc.apply(*args)


class FusedDense(nn.Module):
    """Linear layer with parameters `weight` (out, in) and `bias` (out) or None.

    Source: Apex 25.05, `apex.fused_dense.FusedDense`.
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output, shape (..., out_features)."""
        if self.bias is None:
            return _dense_no_bias(input, self.weight)
        return _fused_dense(input, self.weight, self.bias)


class FusedDenseGeluDense(nn.Module):
    """Linear layer, GELU, linear layer, with parameters `weight1`, `bias1`, `weight2` and `bias2`.

    Raises:
        AssertionError: `bias=False`.

    Source: Apex 25.05, `apex.fused_dense.FusedDenseGeluDense`.
    """

    def __init__(
        self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True
    ) -> None:
        super().__init__()
        if not bias:
            raise AssertionError("FusedDenseGeluDense got bias=False, but it always has biases; leave it out")
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        self.weight1 = nn.Parameter(torch.empty(intermediate_features, in_features))
        self.bias1 = nn.Parameter(torch.empty(intermediate_features))
        self.weight2 = nn.Parameter(torch.empty(out_features, intermediate_features))
        self.bias2 = nn.Parameter(torch.empty(out_features))

    def forward(self, input: Tensor) -> Tensor:
        """Return the output, shape (..., out_features)."""
        return _fused_dense_gelu_dense(input, self.weight1, self.bias1, self.weight2, self.bias2)
