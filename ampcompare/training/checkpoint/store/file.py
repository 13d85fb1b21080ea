"""One checkpoint as one file: written whole or not at all, checked for damage, never executed.

A file is what `torch.save` writes, so that `torch.load(path, weights_only=True)` opens it anywhere. The checksum is the
comment at the end of this zip archive: XXH3 of 128 bits over every byte that `torch.save` wrote. It detects
damage, not forgery. A forged file cannot run code: reading imports and calls nothing (`unpickle`).
"""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash

from ampcompare.base.errors import CheckpointError, EnvironmentUnfit
from ampcompare.base.files.write import write_atomically, write_file
from ampcompare.base.tensors.tree import mapped
from ampcompare.training.checkpoint.reader.foreign import Contents, explained, open_members, open_regular
from ampcompare.training.checkpoint.store.frame import COMMENT, COMMENT_SIZE, read_frame
from ampcompare.training.checkpoint.store.layout import SCHEMA, require_plain

__all__ = [
    "checksum",
    "hash_bytes",
    "read_checkpoint",
    "verify_file",
    "write_checkpoint",
    "write_pickle",
    "write_weights",
]

LOCAL_HEADER_SIZE = 30
CHUNK = 1 << 20


class _Writer:
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

    Args:
        state: tensors and plain values, by the keys of `layout`; the schema number is added.

    Raises:
        CheckpointError: the state holds another object.
        EnvironmentUnfit: the disk is full, the folder cannot be written, or what it holds is not what was written.
            A file that was there before is untouched.
    """
    require_plain(state)

    def write(file: IO[bytes]) -> None:
        writer = _Writer(file)
        torch.save({"schema": SCHEMA, **state}, cast("IO[bytes]", writer))
        if writer.error is not None:
            raise writer.error
        comment = COMMENT.format(writer.hash.hexdigest()).encode()
        file.seek(-2, os.SEEK_END)  # the length of the comment ends an archive without one
        file.write(len(comment).to_bytes(2, "little") + comment)

    def verify(written: Path) -> None:
        try:
            verify_file(written)
        except CheckpointError as error:
            raise EnvironmentUnfit(
                f"what was written to {path} does not read back as written: {error}; check the disk"
            ) from error

    write_file(path, write, verify=verify)


def write_pickle(path: Path, state: Any) -> None:
    """Write what `torch.save` makes of any state, without a checksum, in one move.

    Raises:
        EnvironmentUnfit: as for `write_checkpoint`.
    """
    content = BytesIO()  # torch cannot be stopped inside a write that fails
    torch.save(state, content)
    write_atomically(path, content.getvalue())


def write_weights(path: Path, weights: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
    """Write weights alone as a safetensors file, in one move.

    Raises:
        EnvironmentUnfit: as for `write_checkpoint`.
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
        device: where its tensors go.

    Raises:
        CheckpointError: no such file, another kind of file, a truncated or damaged one, one that would run code, or one
            of a newer ampcompare.
    """
    contents = _read_verified(path)
    if contents.calls:
        raise CheckpointError(f"{path} would run code: it calls {', '.join(contents.calls[:5])}; it is not opened")
    state, _ = contents.plain()
    if not isinstance(state, dict) or not isinstance(state.get("schema"), int):
        raise CheckpointError(f"{path} is not a checkpoint of ampcompare: it has no schema number")
    if state["schema"] > SCHEMA:
        raise CheckpointError(
            f"{path} has schema {state['schema']}, and this version reads up to {SCHEMA}; upgrade ampcompare"
        )
    return state if torch.device(device).type == "cpu" else mapped(state, lambda tensor: tensor.to(device))


def verify_file(path: Path) -> None:
    """Check that a file ends with the checksum of its bytes.

    Raises:
        CheckpointError: it does not, or cannot be read; says which kind of file it is instead.
    """
    with _opened(path) as (file, size, end):
        file.seek(0)
        hashed = hash_bytes(file, size - COMMENT_SIZE - 2)
        _compare(path, _finish(hashed, file.read(2)), end)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BufferedReader, int, bytes]]:
    """Open a checkpoint; give the file, its size and the comment at its end.

    Raises:
        CheckpointError: it has none, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            size, end = read_frame(path, file)
            yield file, size, end
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror or error}") from None


def _read_verified(path: Path) -> Contents:
    """Read an archive and its checksum in one pass over the file, before anything in its members is looked at."""
    with _opened(path) as (file, size, end):
        members: dict[str, torch.Tensor] = {}
        with explained(path), zipfile.ZipFile(file) as archive:
            hashed = xxhash.xxh3_128()
            file.seek(0)
            for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
                gap = info.header_offset - file.tell()
                if gap < 0 or info.header_offset + info.file_size > size:
                    raise CheckpointError(f"{path} is damaged: its members overlap")
                start = file.read(gap + LOCAL_HEADER_SIZE)
                lengths = struct.unpack("<HH", start[-4:])
                hashed.update(start + file.read(sum(lengths)))
                data = members[info.filename] = torch.empty(info.file_size, dtype=torch.uint8)
                file.readinto(data.numpy().data)
                hashed.update(data.numpy().data)
            left = max(2, size - COMMENT_SIZE - file.tell())
            _compare(path, _finish(hashed, file.read(left)), end)
            return open_members(path, archive, members.__getitem__)


def _finish(hashed: xxhash.xxh3_128, last: bytes) -> str:
    """Return the checksum, whose last two bytes were hashed as 0 before the length of the comment was written there."""
    has_length = last[-2:] == COMMENT_SIZE.to_bytes(2, "little")
    hashed.update(last[:-2] + (bytes(2) if has_length else last[-2:]))
    return hashed.hexdigest()


def _compare(path: Path, right: str, end: bytes) -> None:
    if end != COMMENT.format(right).encode():
        raise CheckpointError(
            f"{path} is damaged: its bytes have the checksum {right[:8]}..., and its end says "
            f"{end[-32:-24].decode()}...; take the checkpoint before it"
        )


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
