"""The bits of tensors, by which a write is seen that leaves no trace in a version."""

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of the elements of a dense tensor, their bits taken for whole numbers: int64, (), on its device.

    Args:
        tensor: of any shape and of a type of 1, 2, 4 or 8 bytes.
    """
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).sum()
