"""How much memory the reader of a checkpoint may use: in proportion to the file, whatever the file asks for."""

from __future__ import annotations

import sys
from typing import Any

import numpy
from torch import Tensor

from ampcompare.checkpoint.reader.placeholders import Global, NotPickled, Opaque, StoredTensor

__all__ = ["Budget"]

MIN_BYTES = 64 << 20
BYTES_PER_BYTE = 5
MAX_INSTRUCTIONS = 10_000_000
SLOT = 9  # a pointer in a list that grows
ITEM = 100  # an entry of a dict, with its share of free places
OBJECT = 700  # an object with a dict of attributes
TENSOR = 1500  # a tensor object of torch, and what stands for it before
MIN_ITEMSIZE = 4  # a conversion makes every narrower tensor fp32


class Budget:
    """Counts what is built from one file, and refuses the file before it takes too much.

    A pickle names an object again in two bytes, so that a small file can ask for any amount of memory: one text,
    encoded thousands of times, or one storage behind thousands of tensors. What is counted is an upper estimate of
    the bytes of Python objects, and the bytes of every tensor as if each had memory of its own.

    Args:
        size: of the file, in bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = max(MIN_BYTES, BYTES_PER_BYTE * size)
        self.instructions = MAX_INSTRUCTIONS

    def charge(self, count: int) -> None:
        """Count bytes before they are used.

        Raises:
            NotPickled: they are more than are left.
        """
        self.left -= count
        if self.left < 0:
            raise NotPickled(
                f"its {self.size} bytes would take more than {max(MIN_BYTES, BYTES_PER_BYTE * self.size) >> 20} MiB "
                "of memory; no program writes such a checkpoint"
            )

    def charge_object(self, made: Any) -> None:
        """Count an object that was built, without what it refers to."""
        if isinstance(made, StoredTensor):
            self.charge(TENSOR + made.count * max(MIN_ITEMSIZE, made.dtype.itemsize))
        elif isinstance(made, Opaque | Global):
            self.charge(OBJECT)
            if isinstance(made, Opaque):
                self.charge_value(made.value)
        else:
            self.charge(sys.getsizeof(made) + SLOT)

    def charge_value(self, value: Any) -> None:
        """Count the array that a placeholder holds once its state is known."""
        if isinstance(value, Tensor | numpy.ndarray):
            self.charge(TENSOR + value.nbytes)

    def step(self) -> None:
        """Count an instruction.

        Raises:
            NotPickled: there were too many.
        """
        self.instructions -= 1
        if self.instructions < 0:
            raise NotPickled(f"its pickle has more than {MAX_INSTRUCTIONS} instructions; no program writes such")
