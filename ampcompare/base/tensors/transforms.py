"""Tensors inside of functions of `torch.func`, which wrap them, and whose wrappers have no data to be read."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def tensor_inside_wrappers(value: Tensor) -> Tensor:
    """Return the tensor that functions of `torch.func` have wrapped; one that none has wrapped is itself."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Compute as outside of `vmap`, `grad` and their kin."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
    else:
        with temporarily_clear_interpreter_stack():
            yield
