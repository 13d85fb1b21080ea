"""Replace functions and methods, and restore them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Patches"]


class Patches:
    """Replaced attributes, in order.

    A function that other code has wrapped since cannot be restored; it then calls the original only.
    """

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any, bool]] = []
        self.active = True

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace `owner.name` by a function that calls `around(original, *args, **kwargs)`.

        While torch.compile traces, only the original is called.
        """
        original = getattr(owner, name)
        compiling = torch.compiler.is_compiling

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not self.active or compiling():
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        self.put(owner, name, replacement)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`."""
        is_own = name in vars(owner)
        self._done.append((owner, name, vars(owner).get(name), value, is_own))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore the originals, the last one first."""
        self.active = False
        for owner, name, before, value, is_own in reversed(self._done):
            if vars(owner).get(name) is not value:
                continue
            if is_own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
        self._done.clear()
