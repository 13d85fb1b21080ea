"""Notice a script that updates weights itself, without an optimizer of torch."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

__all__ = ["UpdatesByHand"]

MAX_WATCHED = 4096


class UpdatesByHand:
    """Compares a weight before and after the passes of a script that has made no optimizer.

    `param.data.add_(...)` leaves no trace but the value.
    """

    def __init__(self) -> None:
        self._held: tuple[weakref.ref[Tensor], Tensor] | None = None
        self._has_pass = False

    def note_backward(self) -> None:
        """Note a backward pass."""
        self._has_pass = True

    def has_updated(self, module: nn.Module) -> bool:
        """Return whether a module that is called has other weights than at its last call, with a pass in between.

        The weight watched is its last one, of which every batch changes all or most; the first may be an embedding.
        """
        params = [param for param in module.parameters() if param.requires_grad] if torch.is_grad_enabled() else []
        if not params:
            return False
        now = params[-1].detach().flatten()[:MAX_WATCHED]
        is_known = self._held is not None and self._held[0]() is params[-1]
        if is_known and not self._has_pass:
            return False
        changed = is_known and self._held is not None and not torch.equal(self._held[1], now)
        self._held, self._has_pass = (weakref.ref(params[-1]), now.clone()), False
        return changed
