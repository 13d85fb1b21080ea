"""Rows of many small tensors, counted together: of each alone the calls would cost more than the counting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ampcompare.diagnosis.ranges import lost_in, range_rows, widened

__all__ = ["Pending", "SmallTensors"]

MAX_ELEMENTS = 2**13  # of a tensor that waits
MAX_WAITING = 2**16  # elements of all that wait, which bounds the memory


@dataclass(eq=False)
class Pending:
    """A row that is counted later.

    Attributes:
        source: that it is the widened row of, if it is.
    """

    counted: np.ndarray | None = None
    source: Pending | None = None

    @property
    def row(self) -> np.ndarray:
        """The row.

        Raises:
            RuntimeError: it is not counted yet.
        """
        if self.source is not None:
            return np.asarray(widened(self.source.row))
        if self.counted is None:
            raise RuntimeError("the rows of small tensors are not counted yet")
        return self.counted


class SmallTensors:
    """Copies of the values of small tensors on the host, until they are counted."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._lost: list[int] = []
        self._pending: list[Pending] = []
        self._elements = 0

    def accepts(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the host, and small."""
        return tensor.device.type == "cpu" and 0 < tensor.numel() <= MAX_ELEMENTS

    def add(self, tensor: Tensor, exact: Tensor | None = None) -> Pending:
        """Return the row of a tensor, to be counted; arguments are those of `ranges.range_row`."""
        values = tensor.detach().reshape(-1).to(torch.float32, copy=True)
        self._values.append(values)
        self._lost.append(0 if exact is None else lost_in(tensor, exact))
        pending = Pending()
        self._pending.append(pending)
        self._elements += len(values)
        if self._elements > MAX_WAITING:
            self.count()
        return pending

    def count(self) -> None:
        """Count what waits."""
        if not self._values:
            return
        for pending, row in zip(self._pending, range_rows(self._values, self._lost), strict=True):
            pending.counted = row
        for waiting in (self._values, self._lost, self._pending):
            waiting.clear()
        self._elements = 0
