"""Recognize a checkpoint of ampcompare by the first and last bytes of its file; torch is not imported for it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

from ampcompare.base.errors import CheckpointError

__all__ = ["COMMENT", "COMMENT_SIZE", "read_frame"]

COMMENT = "ampcompare checkpoint 1 xxh3-128 {}"
COMMENT_SIZE = len(COMMENT.format("0" * 32))
ANY_COMMENT = re.compile(rb"ampcompare checkpoint (\d{1,9}) [\w-]+ [0-9a-f]+")
END_RECORD_SIZE = 22


def read_frame(path: Path, file: BinaryIO) -> tuple[int, bytes]:
    """Return the size of a checkpoint, in bytes, and the comment at its end.

    Raises:
        CheckpointError: it is empty, of another kind, of a newer ampcompare, or cut off.
    """
    size = os.fstat(file.fileno()).st_size
    head = file.read(512)
    if size == 0:
        raise CheckpointError(f"{path} is empty; take the checkpoint before it")
    if not head.startswith(b"PK"):
        raise CheckpointError(f"{path} is not a checkpoint of ampcompare: {_kind(head)}")
    file.seek(max(0, size - COMMENT_SIZE))
    end = file.read(COMMENT_SIZE)
    comment = ANY_COMMENT.fullmatch(end) or ANY_COMMENT.search(end)
    if comment and int(comment[1]) > 1:
        raise CheckpointError(f"{path} was written by a newer ampcompare; upgrade this one")
    if comment is None or len(comment[0]) != COMMENT_SIZE or size < COMMENT_SIZE + END_RECORD_SIZE:
        raise CheckpointError(
            f"{path} was cut off, or not written by ampcompare: no checksum at its end; "
            "take the checkpoint before it, or let `ampcompare convert` read one of another program"
        )
    return size, end


def _kind(head: bytes) -> str:
    if head.startswith(b"\x80"):
        return "it is a pickle, or of torch before 1.6; `ampcompare convert` reads these"
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:
            return "it is not an archive"
    return "it is a text file" if b"\0" not in head else "it is not an archive"
