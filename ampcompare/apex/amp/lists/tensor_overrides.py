"""Methods of `torch.Tensor` that O1 casts: operators, and the functions of `torch` that exist as methods.

Source: Apex 25.05, `apex/amp/lists/tensor_overrides.py`.
"""

import torch

from . import torch_overrides

MODULE: type[torch.Tensor] = torch.Tensor


def _names_of_existing_methods(*names: str) -> list[str]:
    return [name for name in names if hasattr(MODULE, name)]


FP16_FUNCS: list[str] = _names_of_existing_methods("__matmul__", *torch_overrides.FP16_FUNCS)

FP32_FUNCS: list[str] = _names_of_existing_methods(
    "__ipow__", "__pow__", "__rpow__", "cpu", *torch_overrides.FP32_FUNCS
)

CASTS: list[str] = _names_of_existing_methods(
    *("__add__", "__div__", "__eq__", "__ge__", "__gt__", "__iadd__", "__idiv__", "__imul__", "__isub__"),
    *("__itruediv__", "__le__", "__lt__", "__mul__", "__ne__"),
    *("__radd__", "__rdiv__", "__rmul__", "__rsub__"),
    *("__rtruediv__", "__sub__", "__truediv__", *torch_overrides.CASTS),
)

SEQUENCE_CASTS: list[str] = _names_of_existing_methods(*torch_overrides.SEQUENCE_CASTS)
