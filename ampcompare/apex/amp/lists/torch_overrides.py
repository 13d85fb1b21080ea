"""Functions of `torch` that O1 casts.

Source: Apex 25.05, `apex/amp/lists/torch_overrides.py`, as built with CUDA: batched products are half.
"""

from types import ModuleType

import torch

MODULE: ModuleType = torch

FP16_FUNCS: list[str] = [
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d"),
    *("conv_transpose2d", "conv_transpose3d", "conv_tbc", "prelu"),
    *("addmm", "addmv", "addr", "matmul", "mm", "mv"),
    # A build of Apex without CUDA leaves these out, and attention then fails on mixed inputs.
    *("addbmm", "baddbmm", "bmm"),
]

FP32_FUNCS: list[str] = [
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log"),
    *("log10", "log2", "reciprocal", "rsqrt", "sinh", "tan"),
    *("pow", "cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm"),
]

CASTS: list[str] = [
    *("addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot", "add", "div", "mul"),
    *("eq", "equal", "ge", "gt", "le", "lt", "ne"),
]

SEQUENCE_CASTS: list[str] = ["cat", "stack"]
