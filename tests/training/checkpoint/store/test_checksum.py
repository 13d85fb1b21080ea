"""XXH3 over the bytes of a file."""

from pathlib import Path

import pytest
import xxhash

from ampcompare.training.checkpoint.store.file import CHUNK, hash_bytes


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_a_file_of_any_size_has_the_hash_of_its_bytes(tmp_path: Path, size: int) -> None:
    """However many pieces it is read in."""
    content = bytes(range(251)) * (size // 251 + 1)
    path = tmp_path / "file"
    path.write_bytes(content[:size])
    with path.open("rb") as file:
        assert hash_bytes(file, size).hexdigest() == xxhash.xxh3_128(content[:size]).hexdigest()
