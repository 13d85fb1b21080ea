"""Notice that a script reads gradients, so that they are unscaled first.

Apex unscales at the end of each `scale_loss` block. An arm unscales once per step, since several blocks may add to the
same gradients: right before their first reader.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["GradientReads"]

_GRAD: Any = vars(torch._C.TensorBase)["grad"]


class GradientReads:
    """While anyone wants it, `tensor.grad` calls a function before it returns the gradient.

    Watching costs two assignments; between a step and the next block, when nobody wants it, nothing is watched.
    `zero_grad` is no reader.

    Attributes:
        before: called with the tensor.
    """

    def __init__(self, before: Callable[[Tensor], None] = lambda tensor: None) -> None:
        self.before = before
        self._wanted_by: set[int] = set()
        self._pauses = 0
        self._watching = False
        self._get: Callable[[Tensor], Any] = _GRAD.__get__
        self._put: Callable[[Tensor, Any], None] = _GRAD.__set__
        self._is_redirected = False
        self._property = property(self._read, lambda tensor, grad: self._put(tensor, grad), _GRAD.__delete__)

    def _read(self, tensor: Any) -> Any:
        if self._wanted_by and not self._pauses and sys._getframe(1).f_code.co_name != "zero_grad":
            self.before(tensor)
        return self._get(tensor)

    def redirect(self, get: Callable[[Tensor], Any] | None, put: Callable[[Tensor, Any], None] | None) -> None:
        """Let reads and assignments go elsewhere, also while nobody wants to notice them; None ends that."""
        self._get, self._put = get or _GRAD.__get__, put or _GRAD.__set__
        self._is_redirected = get is not None
        self._set()

    def want(self, who: object, wanted: bool) -> None:
        """Note whether `who` wants to notice readers from now on."""
        (self._wanted_by.add if wanted else self._wanted_by.discard)(id(who))
        self._set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run a block whose reads do not count; blocks nest."""
        self._pauses += 1
        self._set()
        try:
            yield
        finally:
            self._pauses -= 1
            self._set()

    def _set(self) -> None:
        wanted = self._is_redirected or (bool(self._wanted_by) and not self._pauses)
        if wanted == self._watching:
            return
        self._watching = wanted
        if wanted:
            Tensor.grad = self._property  # type: ignore[assignment]
        elif vars(Tensor).get("grad") is self._property:
            del Tensor.grad
