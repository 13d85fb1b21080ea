"""XXH3 of 128 bits over the bytes of a file: it detects damage, not forgery."""

from __future__ import annotations

import os
from io import BufferedReader
from pathlib import Path

import xxhash

from ampcompare.checkpoint.reader.foreign import open_regular

__all__ = ["checksum", "hash_bytes"]

CHUNK = 1 << 20


def checksum(path: Path) -> str:
    """Return the checksum of a whole file, in hexadecimal.

    Raises:
        CheckpointError: it is no regular file.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        return hash_bytes(file, os.fstat(file.fileno()).st_size).hexdigest()


def hash_bytes(file: BufferedReader, size: int) -> xxhash.xxh3_128:
    """Return the hash of the next `size` bytes of a file, or of fewer where it ends before; more can be added."""
    hashed = xxhash.xxh3_128()
    buffer = memoryview(bytearray(CHUNK))
    while size > 0 and (count := file.readinto(buffer[: min(CHUNK, size)])):
        hashed.update(buffer[:count])
        size -= count
    return hashed
