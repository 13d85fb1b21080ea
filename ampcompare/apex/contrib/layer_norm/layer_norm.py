"""`FastLayerNorm`: layer normalization over the last dimension, of any size."""

from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    fused_layer_norm_affine,
)


class FastLayerNormFN:
    """Layer normalization over the last dimension, called by `apply`."""

    @staticmethod
    def apply(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, memory_efficient: bool = False) -> Any:
        """Return the normalized `x`, times `gamma`, plus `beta`, in the dtype of `x`."""
        return FusedLayerNormAffineFunction.apply(x, gamma, beta, gamma.shape, epsilon, memory_efficient)


class FastLayerNorm(nn.Module):
    """Layer normalization over the last dimension; Apex's kernel supports some sizes only, this one all.

    Source: Apex 25.05, `apex.contrib.layer_norm.FastLayerNorm`.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized `x`, in its dtype."""
        shape = self.weight.shape
        return fused_layer_norm_affine(x, self.weight, self.bias, shape, self.epsilon, self.memory_efficient)
