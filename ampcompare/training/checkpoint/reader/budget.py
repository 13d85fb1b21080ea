"""How much memory the reader of a checkpoint may use: in proportion to the file, whatever the file asks for."""

from __future__ import annotations

import contextlib
import struct
import sys
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy
from torch import Tensor

from ampcompare.base.errors import CheckpointError
from ampcompare.training.checkpoint.reader.placeholders import Global, NotPickled, Opaque, StoredTensor

__all__ = ["Budget", "open_archive"]

MIN_BYTES = 64 << 20
BYTES_PER_BYTE = 5
MAX_INSTRUCTIONS = 10_000_000
SLOT = 9  # a pointer in a list that grows
ITEM = 100  # an entry of a dict, with its share of free places
OBJECT = 700  # an object with a dict of attributes
TENSOR = 1500  # a tensor object of torch, and what stands for it before
MIN_ITEMSIZE = 4  # a conversion makes every narrower tensor fp32
END = b"PK\x05\x06"
END_SIZE = 22
END_64_AND_LOCATOR = 56 + 20
LONGEST_COMMENT = 1 << 16
IN_END_64 = 0xFFFFFFFF
SMALL_DIRECTORY = 1 << 20


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


def open_archive(path: Path, budget: Budget, file: IO[bytes] | None = None) -> zipfile.ZipFile:
    """Open an archive and check that its members are uncompressed and do not overlap in the file.

    `zipfile` makes an object for each entry of the directory, so the size of that is looked at first.

    Args:
        budget: is charged for the members.
        file: of `path`, open for reading; where None, the archive opens and closes one of its own.

    Raises:
        CheckpointError: members are compressed or overlap, or there is more directory than data.
        NotPickled: there are too many members for a file of this size.
    """
    size = path.stat().st_size
    with contextlib.nullcontext(file) if file else path.open("rb") as looked_at:
        if _directory_size(looked_at, size) > max(SMALL_DIRECTORY, size // 2):
            raise CheckpointError(f"{path} is not an archive of torch.save: most of it is a list of members")
    archive = zipfile.ZipFile(file or path)
    left = size
    for info in archive.infolist():
        budget.charge(TENSOR)
        left -= info.file_size
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise CheckpointError(f"{path} is not an archive of torch.save: {info.filename[:40]!r} is compressed")
        if left < 0:
            raise CheckpointError(f"{path} is damaged: its members claim more than its {size} bytes")
    return archive


def _directory_size(file: IO[bytes], size: int) -> int:
    """Return the bytes of the directory as the end of the file gives them; 0 without an end record."""
    begin = max(0, size - LONGEST_COMMENT - END_SIZE - END_64_AND_LOCATOR)
    file.seek(begin)
    tail = file.read()
    at = tail.rfind(END)
    if at < 0 or at + END_SIZE > len(tail):
        return 0
    (found,) = struct.unpack_from("<I", tail, at + 12)
    if found == IN_END_64 and at >= END_64_AND_LOCATOR:
        (found,) = struct.unpack_from("<Q", tail, at - END_64_AND_LOCATOR + 40)
    return int(found)
