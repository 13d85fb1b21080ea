"""Open a checkpoint of any program, of any torch, and say what it holds, without running anything in it."""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ampcompare.base.errors import AmpCompareError, CheckpointError
from ampcompare.base.files.read import FileFault
from ampcompare.base.files.read import open_regular as open_descriptor
from ampcompare.training.checkpoint.reader.placeholders import (
    LOGS,
    Global,
    NotPickled,
    Opaque,
    StoredTensor,
    describe_fault,
    holds_only_data,
)
from ampcompare.training.checkpoint.reader.unpickler import require_bounded, storage_of, unpickle

__all__ = ["Contents", "as_tensor", "name_faults", "open_foreign", "open_regular"]

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MAX_DEPTH = 64
LONGEST_SHOWN = 80
MAX_SHOWN = 20
FREE_ELEMENTS = 1 << 20


class Contents:
    """What a file holds.

    Attributes:
        path: of the file.
        format: "torch archive", "torch before 1.6", "pickle" or "safetensors".
        size: of the file, in bytes.
        root: as `unpickle` gives it.
        calls: what unpickling by torch would call beyond plain data and tensors.
        comment: what stands at the end of an archive.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        root: Any,
        calls: list[str],
        read: Callable[[str], Tensor],
        comment: bytes = b"",
    ) -> None:
        self.path = path
        self.format = format
        self.size = path.stat().st_size
        self.root = root
        self.calls = calls
        self.comment = comment
        self._read = read
        self._storages: dict[str, Tensor] = {}
        self._plain: Any = None
        self._left_out: dict[str, str] | None = None

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Read a tensor; those that share memory in the file share it here.

        Raises:
            CheckpointError: its bytes are not there.
        """
        if stored.storage not in self._storages:
            with name_faults(self.path):
                self._storages[stored.storage] = self._read(stored.storage)
        held = self._storages[stored.storage]
        reach = sum((size - 1) * step for size, step in zip(stored.shape, stored.stride, strict=True)) + 1
        if not stored.count:
            return torch.empty(stored.shape, dtype=stored.dtype)
        count = held.nbytes // stored.dtype.itemsize
        if not stored.offset + reach <= count or stored.count > max(count, FREE_ELEMENTS):
            raise CheckpointError(f"{self.path} is damaged: a tensor reaches beyond its {held.nbytes} stored bytes")
        whole = held[: held.nbytes // stored.dtype.itemsize * stored.dtype.itemsize].view(stored.dtype)
        view = whole.as_strided(stored.shape, stored.stride, stored.offset)
        view = view.conj().resolve_conj() if stored.conjugate else view
        return view.neg() if stored.negative else view

    def plain(self) -> tuple[Any, list[str]]:
        """Return what the file holds as tensors and plain values, and place and class of the objects that are left out.

        Classes that only hold values, such as `argparse.Namespace`, become dicts of what they hold.

        Raises:
            CheckpointError: tensors that are not there, or values that hold themselves.
        """
        left_out = [f"{place}: {name}" for place, name in self._objects().items()]
        return self._plain, left_out

    @property
    def needs_trust(self) -> bool:
        """Whether it holds more than tensors, plain values, holders of these, and logs that are left out."""
        ways_to_logs = {LOGS, "builtins.getattr", "__builtin__.getattr"}
        return not ways_to_logs.issuperset(self.calls) or any(name != LOGS for name in self._objects().values())

    def _objects(self) -> dict[str, str]:
        """Return the class of each object that is left out, by its place."""
        if self._left_out is None:
            self._left_out = {}
            self._plain = self._convert(self.root, None, self._left_out, {}, 0)
        return self._left_out

    def _convert(self, value: Any, place: Place, left_out: dict[str, str], seen: dict[int, Any], depth: int) -> Any:
        """Return a value as tensors and plain values, each container once."""
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{self.path} holds values nested deeper than {MAX_DEPTH}; it is not read")
        if isinstance(value, Global):
            left_out[_as_text(place)] = value.name
            return None
        if not isinstance(value, dict | list | tuple | set | frozenset | StoredTensor | Opaque):
            return value
        if id(value) not in seen:
            seen[id(value)] = None  # of what holds itself, the inner one is left out

            def part(item: Any, *names: Any) -> Any:
                return self._convert(item, (place, *names) if names else place, left_out, seen, depth + 1)

            made: Any
            if isinstance(value, StoredTensor):
                made = self.tensor(value)
            elif isinstance(value, dict):
                made = {key if _is_plain_key(key) else str(key): part(item, key) for key, item in value.items()}
            elif not isinstance(value, Opaque):
                made = [part(item, index) for index, item in enumerate(value)]
                made = tuple(made) if isinstance(value, tuple) else made
            elif value.value is not None:
                made = value.value
            elif not holds_only_data(value.name):
                left_out[_as_text(place)] = value.name
                made = None
            elif isinstance(value.state, dict):
                made = part(value.state)
            elif value.name.startswith("pathlib.") and all(isinstance(item, str) for item in value.arguments):
                made = "/".join(value.arguments)
            else:
                made = [part(item) for item in value.arguments]
            seen[id(value)] = made
        return seen[id(value)]


Place = tuple[Any, Any] | None
"""Where something lies: the place of what holds it, and its key there. Joined only to be shown, as places are many."""


def _as_text(place: Place) -> str:
    """Return a place as text, with only the outermost and innermost keys if there are many."""
    keys: list[str] = []
    while place is not None:
        place, key = place
        keys.append(str(key)[:LONGEST_SHOWN])
    keys.reverse()
    if len(keys) > MAX_SHOWN:
        keys[MAX_SHOWN // 2 : -MAX_SHOWN // 2] = ["…"]
    return ".".join(keys) or "the whole file"


def _is_plain_key(key: Any) -> bool:
    return isinstance(key, str | int | float | bool | bytes | None)


@contextmanager
def name_faults(path: Path) -> Iterator[None]:
    """Turn whatever a parser raises on bytes that are not what they claim into one line about the file."""
    try:
        yield
    except AmpCompareError:
        raise
    except NotPickled as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except Exception as error:  # zipfile alone raises a dozen kinds on damaged archives, few of them its own
        if isinstance(error, OSError) and error.strerror:
            raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}") from None
        raise CheckpointError(f"{path} is damaged: {describe_fault(error)}") from None


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; a pipe would block until a writer opens it.

    Raises:
        CheckpointError: it cannot be opened, or is no regular file.
    """
    try:
        return os.fdopen(open_descriptor(path), "rb")
    except FileFault as fault:
        raise CheckpointError(f"cannot read the checkpoint {path}: {fault}") from None


def open_foreign(path: Path) -> Contents:
    """Open a checkpoint: an archive of torch, a file of torch before 1.6, a plain pickle, or safetensors.

    Raises:
        CheckpointError: no such file, another kind of file, or a damaged one.
    """
    with name_faults(path):
        with open_regular(path) as file:
            head = file.read(512)
        if not head:
            raise CheckpointError(f"{path} is empty; take the checkpoint before it")
        if head.startswith(b"PK\x03\x04"):
            return _open_archive(path)
        if head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] < path.stat().st_size:
            return _open_safetensors(path)
        if head[257:262] == b"ustar":
            raise CheckpointError(
                f"{path} is a tar archive of torch 0.1, which is not supported; save it again with a newer torch"
            )
        if not head.startswith(b"\x80"):
            raise CheckpointError(f"{path} is not a checkpoint: it is neither an archive nor a pickle")
        return _open_stream(path)
    raise AssertionError


def _open_archive(path: Path) -> Contents:
    """Check that an archive is one of torch.save, and read its pickle.

    Raises:
        CheckpointError: it is an archive of something else.
        NotPickled: its pickle is broken.
    """
    archive = zipfile.ZipFile(path)
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{path} is not an archive of torch.save: {info.filename[:40]!r} is compressed")
    members = {info.filename: info for info in archive.infolist()}
    descriptions = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(descriptions) != 1:
        raise CheckpointError(f"{path} is an archive, and none that torch.save wrote: it has no data.pkl")
    folder = descriptions[0].partition("/")[0]
    if f"{folder}/constants.pkl" in members:
        raise CheckpointError(f"{path} is a TorchScript program; give the checkpoint that it was made from")
    order = f"{folder}/byteorder"
    if order in members and archive.read(order) != sys.byteorder.encode():
        raise CheckpointError(
            f"{path} was saved on a machine with the other byte order, which cannot be read here; "
            f"save it again on a machine like this one"
        )
    pickled = archive.read(descriptions[0])
    require_bounded(lambda: unpickle(io.BytesIO(pickled), storage_of), path.stat().st_size)
    return Contents(
        path,
        "torch archive",
        *unpickle(io.BytesIO(pickled), storage_of),
        lambda key: as_tensor(archive.read(f"{folder}/data/{key}")),
        archive.comment,
    )


def _open_stream(path: Path) -> Contents:
    require_bounded(lambda: _read_stream(path), path.stat().st_size)
    format, root, calls, places = _read_stream(path)

    def read(key: str) -> Tensor:
        at, length = places[key]
        with path.open("rb") as file:
            file.seek(at)
            return as_tensor(file.read(length))

    return Contents(path, format, root, calls, read)


def _read_stream(path: Path) -> tuple[str, Any, list[str], dict[str, tuple[int, int]]]:
    """Read what torch before 1.6 wrote: five pickles, then the bytes of the storages; or a pickle of something else.

    Returns:
        The format, what the pickle holds, what it would call, and where the bytes of each storage begin and how many
        they are.
    """
    dtypes: dict[str, torch.dtype] = {}

    def load(identity: Any) -> Any:
        if isinstance(identity, tuple) and len(identity) > 1 and identity[0] == "module":
            return identity[1]  # a class, with its source, which is not looked at
        storage = storage_of(identity)
        dtypes.setdefault(storage.key, storage.dtype)
        return storage

    with path.open("rb") as file:
        first, calls = unpickle(file)
        if first != LEGACY_MAGIC:
            return "pickle", first, calls, {}
        if unpickle(file)[0] != LEGACY_PROTOCOL:
            raise NotPickled("it is of a torch that is not known")
        system, _ = unpickle(file)
        if not isinstance(system, dict) or not system.get("little_endian", True):
            raise NotPickled("it was saved on a machine of the other byte order")
        main, calls = unpickle(file, load)
        return "torch before 1.6", main, calls, _storage_places(file, unpickle(file)[0], dtypes)


def _storage_places(file: IO[bytes], keys: Any, dtypes: dict[str, torch.dtype]) -> dict[str, tuple[int, int]]:
    """Find the bytes of each storage: its number of elements in 8 bytes, then the elements."""
    if not isinstance(keys, list):
        raise NotPickled("it has no list of its storages")
    places = {}
    at = file.tell()
    end = file.seek(0, 2)
    for key in keys:
        dtype = dtypes.get(key) if isinstance(key, str) else None
        if dtype is None:
            raise NotPickled("it lists a storage that nothing uses")
        file.seek(at)
        (count,) = struct.unpack("<q", file.read(8))
        length = count * dtype.itemsize
        if count < 0 or at + 8 + length > end:
            raise NotPickled("it was cut off: a storage reaches beyond its end")
        places[key] = (at + 8, length)
        at += 8 + length
    return places


def as_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor of them, in memory of its own."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _open_safetensors(path: Path) -> Contents:
    from safetensors.torch import load_file

    return Contents(path, "safetensors", load_file(path), [], lambda key: torch.empty(0))
