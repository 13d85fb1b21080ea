"""Cast the arguments of a fused function as torch's autocast would, on any device.

Source: Apex 25.05, `apex._autocast_utils`, which scripts with their own fused layers import.
"""

from typing import Any

import torch
from torch import Tensor


def _get_autocast_dtypes() -> list[torch.dtype]:
    """Return the dtypes that autocast may have on a GPU: float16, and bfloat16 if the GPU supports it."""
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        return [torch.float16, torch.bfloat16]
    return [torch.float16]


def _get_current_dtype(dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of autocast on a GPU if it is on, else float32; `dtype` is ignored, as in Apex."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32


def _cast_if_autocast_enabled(*args: Any) -> Any:
    """Return the arguments as a tuple, floating tensors cast where autocast is on for their device; fp64 stays.

    Tensors in lists, tuples and dictionaries are cast too.
    """
    return tuple(_cast(value) for value in args)


def _cast(value: Any) -> Any:
    if isinstance(value, Tensor):
        device = value.device.type
        if not value.is_floating_point() or value.dtype is torch.float64 or not torch.is_autocast_enabled(device):
            return value
        return value.to(torch.get_autocast_dtype(device))
    if isinstance(value, dict):
        return {_cast(key): _cast(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item) for item in value)
    return value
