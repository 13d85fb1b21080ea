"""Accesses of `tensor.data`, by which a script may write into a tensor without a trace in its version."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_DATA: Any = vars(torch._C.TensorBase)["data"]


class DataAccess:
    """Notes for which of some tensors `data` was read or replaced; without any, `tensor.data` is torch's own."""

    def __init__(self) -> None:
        self._followed: dict[int, Tensor] = {}
        self._taken: set[int] = set()
        self._property = property(self._get, self._set)

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Follow these too, which stay alive until `end`."""
        self._followed.update({id(one): one for one in tensors})
        if self._followed:
            Tensor.data = self._property  # type: ignore[assignment]

    def take(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether `data` of one of these was accessed since the last call for it."""
        if not self._taken:
            return False
        found = self._taken.intersection(map(id, tensors))
        self._taken -= found
        return bool(found)

    def end(self) -> None:
        """Follow none."""
        self._followed.clear()
        self._taken.clear()
        if vars(Tensor).get("data") is self._property:
            del Tensor.data

    def _get(self, tensor: Tensor) -> Any:
        self._note(tensor)
        return _DATA.__get__(tensor)

    def _set(self, tensor: Tensor, values: Tensor) -> None:
        self._note(tensor)
        _DATA.__set__(tensor, values)

    def _note(self, tensor: Tensor) -> None:
        if self._followed.get(id(tensor)) is tensor:
            self._taken.add(id(tensor))
