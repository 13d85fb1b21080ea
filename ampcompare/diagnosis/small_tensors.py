"""Rows and errors of many small tensors, counted together: for each alone the calls would cost more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ampcompare.diagnosis.ranges import range_rows

__all__ = ["Pending", "SmallTensors"]

MAX_ELEMENTS = 2**13  # of a tensor that waits
MAX_WAITING = 2**16  # elements of all that wait, which bounds the memory


@dataclass(eq=False, slots=True)
class Pending:
    """What is counted later of a tensor: its row, and its errors if there is a wide one."""

    counted: np.ndarray | None = None
    norms: tuple[float, ...] | None = None

    @property
    def row(self) -> np.ndarray:
        """The row.

        Raises:
            RuntimeError: it is not counted yet.
        """
        if self.counted is None:
            raise RuntimeError("the rows of small tensors are not counted yet")
        return self.counted


@dataclass(eq=False, slots=True)
class _Waiting:
    """Flat copies of a tensor in fp32, of the same in the wide run, and of what the operation alone gives there."""

    values: Tensor
    exact: Tensor | None
    own: Tensor | None
    counts_lost: bool
    pending: Pending


class SmallTensors:
    """Copies of the values of small tensors on the host, until they are counted."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._elements = 0

    def accepts(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the host, small, and has no values that fp32 lacks."""
        return 0 < tensor.numel() <= MAX_ELEMENTS and tensor.device.type == "cpu" and tensor.dtype is not torch.float64

    def add(
        self, tensor: Tensor, exact: Tensor | None = None, own: Tensor | None = None, *, counts_lost: bool = True
    ) -> Pending:
        """Return the row and errors of a tensor, to be counted.

        Args:
            exact, own: those of `errors.errors_of`.
            counts_lost: what is zero here, and not in `exact`, counts as lost.
        """
        pending = Pending()
        has_own = own is not None and own.numel() == tensor.numel()
        self._waiting.append(
            _Waiting(
                _copied(tensor, torch.float32),
                None if exact is None else _copied(exact, exact.dtype),
                _copied(own, own.dtype) if has_own and own is not None else None,
                counts_lost,
                pending,
            )
        )
        self._elements += tensor.numel()
        if self._elements > MAX_WAITING:
            self.count()
        return pending

    def count(self) -> None:
        """Count what waits."""
        waiting, self._waiting = self._waiting, []
        self._elements = 0
        if not waiting:
            return
        compared = [one for one in waiting if one.exact is not None]
        lost = dict.fromkeys(map(id, waiting), 0)
        if compared:
            lost |= zip(map(id, compared), _compare(compared), strict=True)
        rows = range_rows([one.values for one in waiting], [lost[id(one)] for one in waiting])
        for one, row in zip(waiting, rows, strict=True):
            one.pending.counted = row


def _copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().reshape(-1).to(dtype, copy=True)


def _compare(waiting: list[_Waiting]) -> list[int]:
    """Set the errors of tensors that have a wide one, and return how many elements of each are lost."""
    lengths = [len(one.values) for one in waiting]
    starts = np.cumsum([0, *lengths[:-1]])
    values = np.concatenate([one.values.numpy() for one in waiting])
    wide = np.concatenate([one.exact.numpy() for one in waiting if one.exact is not None])
    own = np.concatenate([(one.values if one.own is None else one.own).numpy() for one in waiting])
    with np.errstate(all="ignore"):  # infinities have no norm
        differences = (values - wide, wide, values - own, values)
        norms = [np.sqrt(np.add.reduceat(np.square(one, dtype=np.float64), starts)) for one in differences]
    for one, row in zip(waiting, np.stack(norms, axis=1).tolist(), strict=True):
        one.pending.norms = (row[0], row[1], row[2] if one.own is not None else 0.0, row[3])
    is_lost = (values == 0) & (wide != 0) & np.repeat([one.counts_lost for one in waiting], lengths)
    return [int(count) for count in np.add.reduceat(is_lost, starts, dtype=np.int64)]
