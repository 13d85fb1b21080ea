"""Exact counts of what a piece of code does on the host, shown next to its times."""

import sys
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def count_calls(code: Callable[[], object]) -> int:
    """Run `code`, and return how many functions it called, those written in C included."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    code()
    sys.setprofile(None)
    return count


def count_operations(code: Callable[[], object]) -> int:
    """Run `code`, and return how many ATen operations it dispatched."""

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.seen += 1
            return func(*args, **(kwargs or {}))

    with Count():
        code()
    return Count.seen
