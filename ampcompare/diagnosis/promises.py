"""What `ampcompare explain` says of the types of functions, as the operations that torch dispatches for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompare.backends.apex_casts import O1_TO_FP16, O1_TO_FP32

__all__ = ["in_fp32", "in_half"]

# Functions that are not in the tables run these operations too, such as square and linalg.norm.
AMBIGUOUS = frozenset(("pow", "linalg_vector_norm", "_to_copy"))
# Inputs to call a function with until it accepts them.
GIVEN: tuple[tuple[tuple[int, ...], ...], ...] = (
    *(((2, 3),), ((2, 3), (2, 3)), ((2, 3), (3, 2)), ((2, 3), (3,))),
    *(((3,), (2, 3), (3,)), ((2, 2), (2, 3), (3, 2)), ((2, 2, 3), (2, 3, 2)), ((2, 3, 5), (2, 3, 2))),
    ((2, 2, 2), (2, 2, 3), (2, 3, 2)),
    *(((2, 3, 5, 5), (2, 3, 2, 2)), ((2, 3, 5, 5, 5), (2, 3, 2, 2, 2)), ((2, 3, 5), (3, 2, 2))),
    *(((2, 3, 5, 5), (3, 2, 2, 2)), ((2, 3, 5, 5, 5), (3, 2, 2, 2, 2))),
)
OTHERS: tuple[tuple[Any, ...], ...] = ((), (0,), ((3,),), (1, 1))


@cache
def in_fp32(device_type: str, autocast: torch.dtype | None) -> Mapping[str, str]:
    """Return the operations that run in fp32 whatever they are given, each with the name of its function.

    Args:
        autocast: those that autocast casts on this device from this type; None for those of O1.
    """
    found = _single_operations(O1_TO_FP32, device_type, autocast or torch.float32, autocast)
    return {name: function for name, (function, dtypes) in found.items() if torch.float32 in dtypes}


@cache
def in_half(device_type: str) -> Mapping[str, str]:
    """Return the operations that O1 and autocast run in 16 bits, such as products, each with its function."""
    found = _single_operations(O1_TO_FP16, device_type, torch.float32, None)
    return {name: function for name, (function, _) in found.items()}


def _single_operations(
    table: Mapping[str, Sequence[str]], device_type: str, dtype: torch.dtype, autocast: torch.dtype | None
) -> dict[str, tuple[str, set[torch.dtype]]]:
    """Call each function of a table, and return the operations of those that run only one."""
    found: dict[str, tuple[str, set[torch.dtype]]] = {}
    for name in (name for names in table.values() for name in names if not name.startswith("__")):
        for function in _functions(name):
            for arguments in _arguments(device_type, dtype):
                seen = _seen(function, arguments, device_type, autocast)
                operations = {operation for operation, _ in seen} - AMBIGUOUS
                if seen:
                    if len(operations) == 1:
                        operation = operations.pop()
                        dtypes = {one for other, types in seen if other == operation for one in types}
                        found.setdefault(operation, (name, dtypes))
                    break
    return found


def _functions(name: str) -> Iterator[Callable[..., Any]]:
    for owner in (torch.nn.functional, torch):
        if hasattr(owner, name):
            yield getattr(owner, name)


def _arguments(device_type: str, dtype: torch.dtype) -> Iterable[tuple[Any, ...]]:
    for others in OTHERS:
        for shapes in GIVEN:
            yield (*(torch.full(shape, 0.5, dtype=dtype, device=device_type) for shape in shapes), *others)


def _seen(
    function: Callable[..., Any], arguments: tuple[Any, ...], device_type: str, autocast: torch.dtype | None
) -> list[tuple[str, set[torch.dtype]]]:
    """Return the operations of one call with the types that go into each; none if it does not accept the inputs."""
    casts = nullcontext() if autocast is None else torch.autocast(device_type, autocast)
    mode = _Operations()
    with suppress(Exception), warnings.catch_warnings(), torch.no_grad(), casts, mode:
        warnings.simplefilter("error")
        function(*arguments)
        return mode.seen
    return []


class _Operations(TorchDispatchMode):
    """Lists floating operations that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, set[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            given = {one.dtype for one in args if isinstance(one, Tensor) and one.is_floating_point()}
            self.seen.append((func.__name__.partition(".")[0].rstrip("_"), given))
        return func(*args, **(kwargs or {}))
