"""Gradients of masters, and of copies that are made for a step, as those of the weights that a script reads.

Before they are unscaled it is the other way round: a master shows the scaled gradient of its weight.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.patches import GRADIENT_READS

Pairs = Sequence[tuple[Tensor, Tensor]]
_GRAD: Any = vars(torch._C.TensorBase)["grad"]


class GradientMirror:
    """`tensor.grad` for 16-bit weights and masters that show each other's; for all others it is what it was."""

    def __init__(self) -> None:
        self._shown: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}  # weight, master, true gradient
        self._scaled: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}  # master, weight

    def let_masters_show_weight_gradients(self, pairs: Pairs) -> None:
        """Let each master show the gradient of its 16-bit weight while that shows none of its master."""
        for param, master in pairs:
            self._scaled[id(master)] = weakref.ref(master), weakref.ref(param)
        self._redirect_or_restore_grad_reads()

    def let_weights_show_master_gradients(self, pairs: Pairs) -> None:
        """Let each 16-bit weight show the gradient of its master, an fp32 tensor of its shape, and drop its own."""
        for param, master in pairs:
            self._shown[id(param)] = param, master, _GRAD.__get__(master)
            _GRAD.__set__(param, None)
        self.let_masters_show_weight_gradients(pairs)

    def make_shown_gradients_own(self, weights: Iterable[Tensor]) -> None:
        """Let each 16-bit weight have the gradient that it shows as its own, in its type."""
        with (
            torch._C._DisableTorchDispatch()
        ):  # what watches the operations of the script sees none of the arm's
            for param in weights:
                _, master, grad = self._shown.pop(id(param), (None, None, None))
                if master is not None:
                    _GRAD.__set__(param, None if grad is None else grad.to(param.dtype))
                    _GRAD.__set__(master, None)
        self._redirect_or_restore_grad_reads()

    def show_own_gradients(self, weights: Iterable[Tensor]) -> None:
        """Let weights and masters show their own gradients again."""
        for param in weights:
            self._shown.pop(id(param), None)
            self._scaled.pop(id(param), None)
        self._redirect_or_restore_grad_reads()

    def does_any_show_master_gradient(self, weights: Iterable[Tensor]) -> bool:
        """Return whether any of these shows a gradient."""
        return any(self._shown.get(id(param), (None, None, None))[2] is not None for param in weights)

    def end(self) -> None:
        """Let all tensors show their own gradients."""
        self._shown.clear()
        self._scaled.clear()
        self._redirect_or_restore_grad_reads()

    def _redirect_or_restore_grad_reads(self) -> None:
        GRADIENT_READS.redirect_gradient_reads(
            *((self._read_gradient, self._write_gradient) if self._shown or self._scaled else (None, None))
        )

    def _weight_behind_master(self, tensor: Tensor) -> Tensor:
        """Return the weight that has a master; the tensor itself if it is none."""
        master, weight = (
            one()
            for one in self._scaled.get(
                id(tensor), (_return_none_as_dead_reference, _return_none_as_dead_reference)
            )
        )
        return tensor if master is not tensor or weight is None else weight

    def _read_gradient(self, tensor: Tensor) -> Any:
        weight = self._weight_behind_master(tensor)
        shown = self._shown.get(id(weight))
        if shown is not None:
            return shown[2]
        grad = _GRAD.__get__(weight)
        return _GRAD.__get__(tensor) if grad is None else grad

    def _write_gradient(self, tensor: Tensor, grad: Tensor | None) -> None:
        weight = self._weight_behind_master(tensor)
        shown = self._shown.get(id(weight))
        if shown is None:
            if weight is not tensor:
                _GRAD.__set__(tensor, None)
                grad = None if grad is None else grad.to(weight.dtype)
            _GRAD.__set__(weight, grad)
            return
        _, master, _ = shown
        wide = None if grad is None else grad.float()
        _GRAD.__set__(master, wide)
        _GRAD.__set__(weight, None)
        if wide is None:
            del self._shown[id(weight)]
            self._redirect_or_restore_grad_reads()
        else:
            self._shown[id(weight)] = weight, master, wide


def _return_none_as_dead_reference() -> None:
    """Stand for a reference to what is no more."""
