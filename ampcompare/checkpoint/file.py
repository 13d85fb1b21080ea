"""One checkpoint as one file: never half there, never damaged unseen, never run.

A file is what `torch.save` writes, so that `torch.load(path, weights_only=True)` opens it anywhere. The checksum is the
comment at the end of this zip archive: XXH3 of 128 bits over every byte that `torch.save` wrote. It tells damage, not
forgery. Against forged files, reading runs nothing of them: not even what `weights_only` allows is called (`unpickle`).
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash

from ampcompare.checkpoint.foreign import Contents, explained, open_members
from ampcompare.checkpoint.layout import SCHEMA, require_plain
from ampcompare.errors import CheckpointError, EnvironmentUnfit

__all__ = ["put_on_disk", "read_checkpoint", "verify_file", "write_checkpoint", "write_safely", "write_weights"]

COMMENT = "ampcompare checkpoint 1 xxh3-128 {}"
COMMENT_SIZE = len(COMMENT.format("0" * 32))
ANY_COMMENT = re.compile(rb"ampcompare checkpoint (\d{1,9}) [\w-]+ [0-9a-f]+")
END_RECORD_SIZE = 22
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

    write_safely(path, write, verify=verify_file)


def write_weights(path: Path, weights: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
    """Write weights alone as a safetensors file, in one move.

    Raises:
        EnvironmentUnfit: as for `write_checkpoint`.
    """
    from safetensors.torch import save

    separate: dict[str, torch.Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, value in weights.items():  # the format has no tensors that share memory
        place = (value.data_ptr(), value.shape, value.stride())
        separate[name] = value.detach().clone() if place in seen else value.detach().contiguous()
        seen.add(place)
    data = save(separate, dict(notes))
    write_safely(path, lambda file: file.write(data))


def write_safely(path: Path, write: Callable[[IO[bytes]], Any], verify: Callable[[Path], None] | None = None) -> None:
    """Give `path` the content that `write` puts into a file, in one move that survives a power cut.

    Raises:
        EnvironmentUnfit: the system refused a part of it, or `verify` the result; `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if verify is not None:
                verify(temporary)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except CheckpointError as error:
        raise EnvironmentUnfit(f"what was written to {path} reads back otherwise: {error}; check the disk") from error
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
        ) from error


def put_on_disk(path: Path) -> None:
    """See that a file that others have written, and its name, survive a power cut.

    Raises:
        EnvironmentUnfit: the system refused.
    """
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot put {path} on the disk: {error.strerror or error}; free some space or choose another folder"
        ) from error
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Put the new name on the disk; some systems and file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
    return state if torch.device(device).type == "cpu" else _moved(state, torch.device(device))


def verify_file(path: Path) -> None:
    """See that a file ends with the checksum of its bytes.

    Raises:
        CheckpointError: it does not, or cannot be read; says which kind of file it is instead.
    """
    with _opened(path) as (file, size, end):
        file.seek(0)
        hashed = xxhash.xxh3_128()
        buffer = memoryview(bytearray(CHUNK))
        left = size - COMMENT_SIZE - 2
        while left > 0 and (count := file.readinto(buffer[: min(CHUNK, left)])):
            hashed.update(buffer[:count])
            left -= count
        _compare(path, _finish(hashed, file.read(2)), end)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BufferedReader, int, bytes]]:
    """Open a checkpoint; give the file, its size and the comment at its end.

    Raises:
        CheckpointError: it has none, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(512)
            if size == 0:
                raise CheckpointError(f"{path} is empty; take the checkpoint before it")
            if not head.startswith(b"PK"):
                raise CheckpointError(f"{path} is not a checkpoint of ampcompare: {_kind(head)}")
            file.seek(max(0, size - COMMENT_SIZE))
            end = file.read(COMMENT_SIZE)
            found = ANY_COMMENT.fullmatch(end) or ANY_COMMENT.search(end)
            if found and int(found[1]) > 1:
                raise CheckpointError(f"{path} was written by a newer ampcompare; upgrade this one")
            if found is None or len(found[0]) != COMMENT_SIZE or size < COMMENT_SIZE + END_RECORD_SIZE:
                raise CheckpointError(
                    f"{path} was cut off, or not written by ampcompare: no checksum at its end; "
                    "take the checkpoint before it, or let `ampcompare convert` read one of another program"
                )
            yield file, size, end
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror or error}") from None


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return type(value)(_moved(item, device) for item in value) if isinstance(value, list | tuple) else value


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
                    raise CheckpointError(f"{path} is damaged: its members lie over each other")
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


def _kind(head: bytes) -> str:
    if head.startswith(b"\x80"):
        return "it is a pickle, or of torch before 1.6; `ampcompare convert` reads these"
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:
            return "it is no archive"
    return "it is a text file" if b"\0" not in head else "it is no archive"
