"""Linear layers whose products are in MXFP8 by torchao's emulation: e4m3 with a power of two for each 32 numbers.

Blocks of 32 lie along the dimension that a product sums over. A block that a size cuts short is filled with zeros,
which change neither its scale nor the sum; so layers and batches of any size work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.backends.library import Library
from ampcompare.base.errors import BackendUnavailable
from ampcompare.precision.replaced_forward import ReplacedForward

__all__ = ["MXFP8Forward", "load_product"]

BLOCK = 32
LIBRARY = Library(("torchao.prototype.moe_training.mxfp8_linear",), ("torchao",), "pip install -U 'torchao>=0.18'")

Product = Callable[[Tensor, Tensor], Tensor]
"""A differentiable product of an input (rows, in) with a weight (out, in), all sizes multiples of 32, in bf16."""


class MXFP8Forward(ReplacedForward):
    """Multiplies a linear layer's operands in MXFP8, forward and backward; input, weight, bias and result are bf16.

    The layer keeps its class, its parameters, its names and its hooks.
    """

    module: nn.Linear

    def __init__(self, layer: nn.Linear, product: Product) -> None:
        super().__init__(layer, layer.forward)
        self.product = product

    def __call__(self, value: Tensor) -> Tensor:
        layer = self.module
        with torch.autocast(value.device.type, enabled=False):
            rows = value.bfloat16().reshape(-1, layer.in_features)
            result = self.product(_filled(rows), _filled(layer.weight.bfloat16()))
            result = result[: len(rows), : layer.out_features].reshape(*value.shape[:-1], layer.out_features)
            return result if layer.bias is None else result + layer.bias.bfloat16()


def _filled(matrix: Tensor) -> Tensor:
    """Return a matrix with zeros up to sizes that are multiples of 32."""
    rows, columns = (-size % BLOCK for size in matrix.shape)
    return F.pad(matrix, (0, columns, 0, rows)) if rows or columns else matrix


def load_product() -> Product:
    """Return torchao's emulated product.

    Raises:
        BackendUnavailable: torchao is not installed, or this one has none.
    """
    linear: Any
    linear, _, version = LIBRARY.load("fp8:mxfp8")
    try:
        choices = (
            torch.float8_e4m3fn,
            torch.float8_e4m3fn,
            torch.float8_e4m3fn,
            BLOCK,
            linear.KernelPreference.EMULATED,
            linear.MXFP8Dim0CastKernelChoice.TORCH,
            linear.MXFP8Dim1CastKernelChoice.TORCH,
            linear.ScaleCalculationMode.RCEIL,
            False,  # the product for the gradient of the weight is in MXFP8 too
        )
        apply = linear.mx_mm.apply
    except AttributeError as error:
        raise BackendUnavailable(f"torchao {version} emulates MXFP8 otherwise ({error}); {LIBRARY.install}") from error
    return lambda value, weight: apply(value, weight, *choices)
