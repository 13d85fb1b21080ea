"""Cast the arguments of a fused function as torch's autocast would, on any device.

Source: Apex 25.05, `apex._autocast_utils`, which scripts with their own fused layers import.
"""

from typing import Any

import torch
from torch import Tensor

from ampcompare.base.tensors.tree import map_tensors_in_tree


def _get_autocast_dtypes() -> list[torch.dtype]:
    """Return the dtypes that autocast may have on a GPU: float16, and bfloat16 if the GPU supports it."""
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        return [torch.float16, torch.bfloat16]
    return [torch.float16]


def _get_current_dtype(dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of autocast on a GPU if it is on, else float32; `dtype` is ignored, as in Apex."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32


def _cast_if_autocast_enabled(*args: Any) -> Any:
    """Return the arguments as a tuple, floating tensors cast where autocast is on for their device; fp64 stays."""
    return tuple(map_tensors_in_tree(value, _cast_to_autocast_type) for value in args)


def _cast_to_autocast_type(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    if (
        not tensor.is_floating_point()
        or tensor.dtype is torch.float64
        or not torch.is_autocast_enabled(device)
    ):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
