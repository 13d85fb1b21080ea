"""The casts of an arm while a script runs: on from `initialize` on, off around backward passes and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

__all__ = ["Casting"]


class Casting:
    """One context of `Precision.autocast` that stays open, and the blocks without it.

    The context is left and made again, not nested: only at the outermost exit does torch drop the casts of weights
    that it has cached.
    """

    def __init__(self) -> None:
        self._make: Callable[[], AbstractContextManager[None]] | None = None
        self._open: AbstractContextManager[None] | None = None
        self._blocks = 0

    @property
    def active(self) -> bool:
        """Whether casts are on now."""
        return self._open is not None

    def start(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        """Switch casts on, instead of those of an earlier call.

        Args:
            make: returns a new context of the arm's casts.
        """
        self._close()
        self._make = make
        if not self._blocks:
            self._enter()

    def end(self) -> None:
        """Switch casts off until the next `start`."""
        self._close()
        self._make = None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Run a block without casts; blocks nest. Cached casts of weights are dropped."""
        self._close()
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                self._enter()

    def forget(self) -> None:
        """Drop cached casts: weights were written."""
        torch.clear_autocast_cache()

    def _enter(self) -> None:
        if self._make is not None:
            self._open = self._make()
            self._open.__enter__()

    def _close(self) -> None:
        if self._open is not None:
            context, self._open = self._open, None
            context.__exit__(None, None, None)
            torch.clear_autocast_cache()  # an autocast block of the script may still be open around this one
