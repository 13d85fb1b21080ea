"""Open the zip archive that `torch.save` writes; one that would unfold into more than it is gets refused."""

from __future__ import annotations

import contextlib
import struct
import zipfile
from pathlib import Path
from typing import IO

from ampcompare.base.errors import CheckpointError
from ampcompare.checkpoint.reader.budget import TENSOR, Budget

__all__ = ["open_archive"]

END = b"PK\x05\x06"
END_SIZE = 22
END_64_AND_LOCATOR = 56 + 20
LONGEST_COMMENT = 1 << 16
IN_END_64 = 0xFFFFFFFF
SMALL_DIRECTORY = 1 << 20


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
