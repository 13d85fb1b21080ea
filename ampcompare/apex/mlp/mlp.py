"""`MLP`: linear layers, each followed by the same activation, the last one too."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcompare.apex._autocast_utils import _cast_if_autocast_enabled

ACTIVATIONS = ("none", "relu", "sigmoid")


class MlpFunction:
    """The function of `MLP`, under the name by which Apex calls it: `MlpFunction.apply`."""

    @staticmethod
    def apply(bias: int, activation: int, *args: Tensor) -> Tensor:
        """Return the output for `args`: the input, all weights, and if `bias` all biases.

        `activation` is 0 for none, 1 for ReLU, 2 for sigmoid.
        """
        output, *params = args
        count = len(params) // 2 if bias else len(params)
        for index in range(count):
            output = F.linear(output, params[index], params[count + index] if bias else None)
            if activation == 1:
                output = F.relu(output)
            elif activation == 2:
                output = torch.sigmoid(output)
        return output


def mlp_function(bias: int, activation: int, *args: Tensor) -> Tensor:
    """Return `MlpFunction.apply` of the arguments, cast as autocast would cast them."""
    cast: Any = _cast_if_autocast_enabled(*args)
    with torch.autocast(args[0].device.type, enabled=False):
        return MlpFunction.apply(bias, activation, *cast)


class MLP(nn.Module):
    """Linear layers of `mlp_sizes[0]` inputs and `mlp_sizes[1:]` outputs, each followed by "none", "relu" or "sigmoid".

    Source: Apex 25.05, `apex.mlp.MLP`.
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise TypeError(f"MLP got activation={activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
        self.num_layers = len(mlp_sizes) - 1
        self.mlp_sizes = list(mlp_sizes)
        self.bias = 1 if bias else 0
        self.activation = ACTIVATIONS.index(activation)
        for index, (inputs, outputs) in enumerate(pairwise(mlp_sizes)):
            self.register_parameter(f"weight_{index}", nn.Parameter(torch.empty(outputs, inputs)))
            if bias:
                self.register_parameter(f"bias_{index}", nn.Parameter(torch.empty(outputs)))
        self.reset_parameters()

    # Looked up each time: a list made once would keep the old parameters of a copied or converted module.
    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights in order."""
        return [getattr(self, f"weight_{index}") for index in range(self.num_layers)]

    @property
    def biases(self) -> list[nn.Parameter]:
        """The biases in order; empty without bias."""
        return [getattr(self, f"bias_{index}") for index in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Draw weights and biases from normal distributions, with variances 2 / (inputs + outputs) and 1 / outputs."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / (weight.size(0) + weight.size(1))))
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, math.sqrt(1.0 / bias.size(0)))

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the last layer, shape (n, mlp_sizes[-1])."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Return the arguments in the module's repr."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"
