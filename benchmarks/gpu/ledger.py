"""Counts of the operations that a step dispatches: the same on every device, so that a CPU can rehearse a GPU."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result is a number for Python: on a GPU the host waits for them.
READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}
# Operations that only make room or look elsewhere at the same bytes.
ALLOCATIONS = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
ALLOCATIONS |= {
    "aten::detach",
    "aten::alias",
    "aten::lift_fresh",
    "aten::_unsafe_view",
    "aten::_reshape_alias",
}


class Ledger(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        reads: operations that bring a number to the host.
        writes: operations that compute or copy; a GPU takes one launch or more for each.
        bytes: of the tensors that those take and give.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.writes = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        to_host = name in ("aten::_to_copy", "aten::copy_") and _leaves_gpu(args, result)
        if name in READS or to_host:
            self.reads += 1
        elif name not in ALLOCATIONS and not func.is_view:
            self.writes += 1
            self.bytes += sum(
                tensor.numel() * tensor.element_size() for tensor in _tensors((args, kwargs, result))
            )
        return result


class WholeReads(TorchFunctionMode):
    """Counts calls that bring a whole tensor to Python; of a tensor on a CPU they dispatch no operation."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func in (Tensor.tolist, Tensor.numpy, Tensor.cpu)
        return func(*args, **(kwargs or {}))


def _leaves_gpu(args: Any, result: Any) -> bool:
    source = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
    return isinstance(result, Tensor) and source.is_cuda and not result.is_cuda


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
