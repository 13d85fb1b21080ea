"""One checkpoint as one file: written whole or not at all, checked for damage, never executed.

A file is what `torch.save` writes, so that `torch.load(path, weights_only=True)` opens it anywhere. The checksum is the
comment at the end of this zip archive: XXH3 of 128 bits over every byte that `torch.save` wrote. It detects
damage, not forgery. A forged file cannot run code either: torch reads plain data and tensors only.
"""

import os
import re
from collections.abc import Mapping
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash

from ampcompare.base.errors import CheckpointError, EnvironmentUnfit
from ampcompare.base.files.write import write_atomically, write_file
from ampcompare.checkpoints.reader.foreign import open_regular_file
from ampcompare.checkpoints.store.layout import SCHEMA, require_plain_state

CHUNK = 1 << 20
COMMENT = "ampcompare checkpoint 1 xxh3-128 {}"
COMMENT_SIZE = len(COMMENT.format("0" * 32))
ANY_COMMENT = re.compile(rb"ampcompare checkpoint (\d{1,9}) [\w-]+ [0-9a-f]+")
END_RECORD_SIZE = 22


class NewerCheckpoint(CheckpointError):
    """A checkpoint that a newer ampcompare has written."""


class _HashingWriter:
    """Hashes what goes into a file. A failing write is kept for later: torch cannot be stopped inside a write."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.hash = xxhash.xxh3_128()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        size = len(data)
        if self.error is None:
            self.hash.update(data)
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        """Leave flushing to the end."""


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Replace `path` by a checkpoint in one move, once its bytes are on the disk and were read back as they should be.

    A file that was there before is untouched if the disk is full, the folder cannot be written, or what it holds is not
    what was written. The schema number is added to the state.
    """
    require_plain_state(state)

    def write_with_checksum(file: IO[bytes]) -> None:
        writer = _HashingWriter(file)
        torch.save({"schema": SCHEMA, **state}, cast("IO[bytes]", writer))
        if writer.error is not None:
            raise writer.error
        comment = COMMENT.format(writer.hash.hexdigest()).encode()
        file.seek(-2, os.SEEK_END)  # the length of the comment ends an archive without one
        file.write(len(comment).to_bytes(2, "little") + comment)

    def verify_written(written: Path) -> None:
        try:
            verify_checksum_of_file(written)
        except CheckpointError as error:
            raise EnvironmentUnfit(
                f"what was written to {path} does not read back as written: {error}; check the disk"
            ) from error

    write_file(path, write_with_checksum, verify=verify_written)


def write_pickle_without_checksum(path: Path, state: Any) -> None:
    """Write what `torch.save` makes of any state, without a checksum, in one move.

    Args:
        path: of the file, which is replaced if there is one.
        state: anything that pickle takes.
    """
    content = BytesIO()  # torch cannot be stopped inside a write that fails
    torch.save(state, content)
    write_atomically(path, content.getvalue())


def write_weights(path: Path, weights: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
    """Write weights alone as a safetensors file, in one move.

    Args:
        path: of the file, which is replaced if there is one.
        weights: tensors by name, of any shape, dtype and device; those that share memory are written once each.
        notes: texts by name, for the header of the file.
    """
    from safetensors.torch import save

    separate: dict[str, torch.Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, value in weights.items():  # the format has no tensors that share memory
        memory = (value.data_ptr(), value.shape, value.stride())
        separate[name] = value.detach().clone() if memory in seen else value.detach().contiguous()
        seen.add(memory)
    write_atomically(path, save(separate, dict(notes)))


def read_checkpoint(path: Path, *, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint that `write_checkpoint` wrote, after its checksum was found right.

    Args:
        path: of the file.
        device: where its tensors are put.

    Raises:
        NewerCheckpoint: a later ampcompare has written it.
        CheckpointError: its checksum is not that of its content.
    """
    verify_checksum_of_file(path)
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    if state["schema"] > SCHEMA:
        raise NewerCheckpoint(
            f"{path} has schema {state['schema']}, and this version reads up to {SCHEMA}; upgrade ampcompare"
        )
    return state


def verify_checksum_of_file(path: Path) -> None:
    """Check that a file ends with the checksum of its bytes."""
    try:
        with open_regular_file(path) as file:
            size, end = _read_size_and_end_comment(path, file)
            file.seek(0)
            hashed = hash_bytes(file, size - COMMENT_SIZE - 2)
            last = file.read(2)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror or error}") from None
    # The length of the comment was hashed as 0, before it was written there.
    hashed.update(bytes(2) if last == COMMENT_SIZE.to_bytes(2, "little") else last)
    right = hashed.hexdigest()
    if end != COMMENT.format(right).encode():
        raise CheckpointError(
            f"{path} is damaged: its bytes have the checksum {right[:8]}..., and its end says "
            f"{end[-32:-24].decode()}...; take the checkpoint before it"
        )


def _read_size_and_end_comment(path: Path, file: IO[bytes]) -> tuple[int, bytes]:
    """Return the size of a checkpoint, in bytes, and the comment at its end; refuse a file without one."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - COMMENT_SIZE))
    end = file.read(COMMENT_SIZE)
    comment = ANY_COMMENT.fullmatch(end) or ANY_COMMENT.search(end)
    if comment and int(comment[1]) > 1:
        raise NewerCheckpoint(f"{path} was written by a newer ampcompare; upgrade this one")
    if comment is None or len(comment[0]) != COMMENT_SIZE or size < COMMENT_SIZE + END_RECORD_SIZE:
        raise CheckpointError(
            f"{path} is {'empty' if size == 0 else 'cut off, or not written by ampcompare: no checksum at its end'}; "
            "take the checkpoint before it, or let `ampcompare convert` read one of another program"
        )
    return size, end


def hash_bytes(file: BufferedReader, size: int) -> xxhash.xxh3_128:
    """Return the hash of the next `size` bytes of a file, or of fewer where it ends before; more can be added."""
    hashed = xxhash.xxh3_128()
    buffer = memoryview(bytearray(CHUNK))
    while size > 0 and (count := file.readinto(buffer[: min(CHUNK, size)])):
        hashed.update(buffer[:count])
        size -= count
    return hashed
