"""Accesses of `tensor.data`, by which a script may write into a tensor without a trace in its version."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_DATA: Any = vars(torch._C.TensorBase)["data"]


class DataAccessFollower:
    """Notes for which of some tensors `data` was read or replaced; without any, `tensor.data` is torch's own.

    Args:
        before: gets a tensor before the first access since `take`.
        after: gets a tensor and what each reading of its `data` has given, which has a version of its own.
    """

    def __init__(
        self,
        before: Callable[[Tensor], None] | None = None,
        after: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        self._before, self._after = before, after
        self._followed: dict[int, Tensor] = {}
        self._taken: set[int] = set()

    def follow_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Follow these too, which stay alive until `end`."""
        self._followed.update({id(one): one for one in tensors})
        if self._followed and self not in _followers:
            _followers.append(self)
            Tensor.data = _PROPERTY  # type: ignore[assignment]

    def was_accessed_since_last_call(self, tensors: Iterable[Tensor]) -> bool:
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
        if self in _followers:
            _followers.remove(self)
        if not _followers and vars(Tensor).get("data") is _PROPERTY:
            del Tensor.data

    def note_access(self, tensor: Tensor) -> None:
        """Note an access, if the tensor is followed."""
        if self._followed.get(id(tensor)) is tensor and id(tensor) not in self._taken:
            self._taken.add(id(tensor))
            if self._before is not None:
                self._before(tensor)

    def note_data_read(self, tensor: Tensor, data: Tensor) -> None:
        """Note what a reading has given, if the tensor is followed.

        Args:
            tensor: whose `data` was read.
            data: what the reading has given.
        """
        if self._after is not None and self._followed.get(id(tensor)) is tensor:
            self._after(tensor, data)


_followers: list[DataAccessFollower] = []  # of this process


def _get_data_and_notify(tensor: Tensor) -> Any:
    for follower in _followers:
        follower.note_access(tensor)
    data = _DATA.__get__(tensor)
    for follower in _followers:
        follower.note_data_read(tensor, data)
    return data


def _set_data_and_notify(tensor: Tensor, values: Tensor) -> None:
    for follower in _followers:
        follower.note_access(tensor)
    _DATA.__set__(tensor, values)


_PROPERTY = property(_get_data_and_notify, _set_data_and_notify)
