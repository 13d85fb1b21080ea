"""Gradients of masters, and of copies that are made for a step, as those of the weights that a script reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompare.guards.events import GRADIENT_READS

__all__ = ["Pairs", "ShownGradients"]

Pairs = Sequence[tuple[Tensor, Tensor]]
_GRAD: Any = vars(torch._C.TensorBase)["grad"]


class ShownGradients:
    """`tensor.grad` for the 16-bit weights whose gradients are shown; for all others it is what it was."""

    def __init__(self) -> None:
        self._shown: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}  # weight, master, true gradient

    def show(self, pairs: Pairs) -> None:
        """Let each 16-bit weight show the gradient of its master, an fp32 tensor of its shape, and drop its own."""
        for param, master in pairs:
            self._shown[id(param)] = param, master, _GRAD.__get__(master)
            _GRAD.__set__(param, None)
        self._set()

    def hide(self, weights: Iterable[Tensor]) -> None:
        """Let weights show their own gradients again."""
        for param in weights:
            self._shown.pop(id(param), None)
        self._set()

    def are_shown(self, weights: Iterable[Tensor]) -> bool:
        """Return whether any of these shows a gradient."""
        return any(self._shown.get(id(param), (None, None, None))[2] is not None for param in weights)

    def end(self) -> None:
        """Let all tensors show their own gradients."""
        self._shown.clear()
        self._set()

    def _set(self) -> None:
        GRADIENT_READS.redirect(*((self._read, self._write) if self._shown else (None, None)))

    def _read(self, tensor: Tensor) -> Any:
        shown = self._shown.get(id(tensor))
        return _GRAD.__get__(tensor) if shown is None else shown[2]

    def _write(self, tensor: Tensor, grad: Tensor | None) -> None:
        shown = self._shown.get(id(tensor))
        if shown is None:
            _GRAD.__set__(tensor, grad)
            return
        param, master, _ = shown
        wide = None if grad is None else grad.float()
        _GRAD.__set__(master, wide)
        _GRAD.__set__(param, None)
        if wide is None:
            del self._shown[id(tensor)]
            self._set()
        else:
            self._shown[id(tensor)] = param, master, wide
