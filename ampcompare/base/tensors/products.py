"""Operations as torch dispatches them, and the multiply-adds of products by the type of their operands."""

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

from ampcompare.base.tensors.type_names import NAME_BY_TORCH_NAME, narrowest_of_type_names

HALF_DTYPES = (torch.float16, torch.bfloat16)  # of 16 bits
SHORT = {getattr(torch, name): short for name, short in NAME_BY_TORCH_NAME.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as it is shown, such as fp16."""
    return SHORT.get(dtype) or str(dtype).removeprefix("torch.")


def type_name_in_reports(tensor: Tensor) -> str:
    """Return the type of a tensor as reports show it; "fp8" for torchao's tensors that hold it."""
    dtype = getattr(tensor, "_data", tensor).dtype if type(tensor) is not Tensor else tensor.dtype
    name = dtype_name(dtype)
    return "fp8" if name.startswith("float8") else name


def narrowest_type_name(tensors: Iterable[Tensor]) -> str:
    """Return the narrowest floating or complex type of some tensors; "" if there is none."""
    found = {
        type_name_in_reports(one) for one in tensors if one.dtype.is_floating_point or one.dtype.is_complex
    }
    return narrowest_of_type_names(found) or min(found, default="")


def product_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """Return the FLOPs of a matrix product, convolution or attention, two for each multiply-add; None for others.

    Args:
        func: an operator such as `torch.ops.aten.mm.default`, as a dispatch mode gets it.
        args, kwargs: of the call; shapes alone count.
        result: of the call.
    """
    formula = flop_registry.get(func._overloadpacket)
    return None if formula is None else int(formula(*args, **kwargs, out_val=result))


@dataclass(frozen=True)
class EmulatedLinearProduct:
    """One product of a linear layer that an emulation has multiplied in a format of its own.

    Attributes:
        layer: its name.
        role: "fprop", "dgrad" or "wgrad".
        format: of its operands, such as "nvfp4".
        text: the same with the way its scales are made, and what else changes its numbers.
        flops: two for each multiply-add.
        figures: of both operands, in fp64: elements, those that were cut off, those that became 0, scales, those at an
            end of their range, the sum of squared errors, that of squares; None for bf16.
        is_lost: whether all of the result is 0 where bf16 operands give something else; None for fprop.
    """

    layer: str
    role: str
    format: str
    text: str
    flops: int
    figures: Tensor | None = None
    is_lost: Tensor | None = None


class OperationMode(TorchDispatchMode, abc.ABC):
    """Sees every operation below autograd and autocast, once each.

    It is entered last, so that an emulation of 16 bits on a CPU runs beneath it and is not seen.
    """

    is_idle = False
    """Sees nothing for now."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def see_linear_product(self, product: EmulatedLinearProduct) -> None:
        """Receive a product of a linear layer whose own operations are not seen."""

    @abc.abstractmethod
    def see_operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Receive an operation that has run.

        Args:
            func: the operation, such as `aten.mm.default`.
            args, kwargs: its arguments.
            result: what it has returned: a tensor, or several.
        """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.is_idle:
            self.see_operation(func, args, kwargs, result)
        return result


def modes_that_see_operations() -> list[OperationMode]:
    """Return what sees the operations of this thread at present."""
    stack = _get_current_dispatch_mode_stack()
    return [mode for mode in stack if isinstance(mode, OperationMode) and not mode.is_idle]


@contextmanager
def hide_operations(modes: Sequence[OperationMode]) -> Iterator[None]:
    """Run a block whose operations these do not see."""
    for mode in modes:
        mode.is_idle = True
    try:
        yield
    finally:
        for mode in modes:
            mode.is_idle = False
