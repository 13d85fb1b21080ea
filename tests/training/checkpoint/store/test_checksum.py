"""XXH3 over the bytes of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from ampcompare.base.errors import CheckpointError
from ampcompare.training.checkpoint.store.file import CHUNK, checksum


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_a_file_of_any_size_has_the_hash_of_its_bytes(tmp_path: Path, size: int) -> None:
    """However many pieces it is read in."""
    content = bytes(range(251)) * (size // 251 + 1)
    path = tmp_path / "file"
    path.write_bytes(content[:size])
    assert checksum(path) == xxhash.xxh3_128(content[:size]).hexdigest()


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    """It would block until a writer opens it."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="it is a pipe"):
        checksum(tmp_path / "fifo")
