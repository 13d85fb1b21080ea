"""Open a checkpoint of any program, of any torch, and say what it holds, without running anything in it."""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
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
from ampcompare.training.checkpoint.reader.unpickler import Unpickled, require_bounded, storage_of, unpickle

__all__ = ["Contents", "as_tensor", "explained", "open_foreign", "open_regular"]

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MAX_DEPTH = 64
LONGEST_SHOWN = 80
MAX_SHOWN = 20
FREE_ELEMENTS = 1 << 20
_WALKED = (dict, list, tuple, Opaque, Global)


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

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Read a tensor; those that share memory in the file share it here.

        Raises:
            CheckpointError: its bytes are not there.
        """
        if stored.storage not in self._storages:
            with explained(self.path):
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
        """Return what the file holds as tensors and plain values, and the places of objects that this leaves out.

        Classes that only hold values, such as `argparse.Namespace`, become dicts of what they hold.

        Raises:
            CheckpointError: tensors that are not there, or values that hold themselves.
        """
        left_out: list[str] = []
        seen: dict[int, Any] = {}
        return self._plain(self.root, None, left_out, seen, 0), left_out

    def _plain(self, value: Any, place: Place, left_out: list[str], seen: dict[int, Any], depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{self.path} holds values nested deeper than {MAX_DEPTH}; it is not read")
        if not isinstance(value, dict | list | tuple | set | frozenset | StoredTensor | Opaque):
            if isinstance(value, Global):
                left_out.append(f"{_shown(place)}: the object {value.name}")
                return None
            return value
        if id(value) not in seen:
            seen[id(value)] = None  # of what holds itself, the inner one is left out
            seen[id(value)] = self._built(value, place, left_out, seen, depth + 1)
        return seen[id(value)]

    def _built(self, value: Any, place: Place, left_out: list[str], seen: dict[int, Any], depth: int) -> Any:
        def part(item: Any, name: Any) -> Any:
            return self._plain(item, (place, name), left_out, seen, depth)

        if isinstance(value, StoredTensor):
            return self.tensor(value)
        if isinstance(value, dict):
            return {key if _is_plain_key(key) else str(key): part(item, key) for key, item in value.items()}
        if isinstance(value, Opaque):
            if value.value is not None:
                return value.value
            if holds_only_data(value.name):
                if isinstance(value.state, dict):
                    return part(value.state, value.name)
                if value.name.startswith("pathlib.") and all(isinstance(item, str) for item in value.arguments):
                    return "/".join(value.arguments)
                return [part(item, value.name) for item in value.arguments]
            left_out.append(f"{_shown(place)}: an object of {value.name}")
            return None
        items = [part(item, index) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items

    def objects(self) -> list[str]:
        """Return the places of objects that are neither tensors nor plain values nor holders of these, at most 200."""
        return [f"{_shown(place)}: {value.name}" for place, value in self._find(self.root)]

    @property
    def needs_trust(self) -> bool:
        """Whether it holds more than tensors, plain values, holders of these, and logs that are left out."""
        ways_to_logs = {LOGS, "builtins.getattr", "__builtin__.getattr"}
        return not ways_to_logs.issuperset(self.calls) or any(value.name != LOGS for _, value in self._find(self.root))

    def _find(self, root: Any) -> Iterator[tuple[Place, Opaque | Global]]:
        """Yield objects of other programs, walking in order and each container once."""
        todo: list[tuple[Place, Any]] = [(None, root)]
        seen: set[int] = set()
        found = 0
        while todo and found < 200:
            place, value = todo.pop()
            if isinstance(value, Opaque | Global) and getattr(value, "value", None) is None:
                if not holds_only_data(value.name):
                    found += 1
                    yield place, value
                    continue
                value = value.state if isinstance(value, Opaque) else None
            if not isinstance(value, dict | list | tuple) or id(value) in seen:
                continue
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            inner = [((place, key), item) for key, item in items if isinstance(item, _WALKED)]
            todo += reversed(inner)


Place = tuple[Any, Any] | None
"""Where something lies: the place of what holds it, and its key there. Joined only to be shown, as places are many."""


def _shown(place: Place) -> str:
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


class explained:
    """Turns whatever a parser raises on bytes that are not what they claim into one line about the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, AmpCompareError):
            return
        if isinstance(error, NotPickled):
            raise CheckpointError(f"{self.path} cannot be read: {error}") from None
        if isinstance(error, OSError) and error.strerror:
            raise CheckpointError(f"cannot read the checkpoint {self.path}: {error.strerror}") from None
        # zipfile alone raises a dozen kinds on damaged archives, few of them its own
        raise CheckpointError(f"{self.path} is damaged: {describe_fault(error)}") from None


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
    with explained(path):
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
    description = unpickle(io.BytesIO(pickled), storage_of)
    return Contents(
        path,
        "torch archive",
        description.root,
        description.calls,
        lambda key: as_tensor(archive.read(f"{folder}/data/{key}")),
        archive.comment,
    )


def _open_stream(path: Path) -> Contents:
    require_bounded(lambda: _read_stream(path), path.stat().st_size)
    format, held, places = _read_stream(path)

    def read(key: str) -> Tensor:
        at, length = places[key]
        with path.open("rb") as file:
            file.seek(at)
            return as_tensor(file.read(length))

    return Contents(path, format, held.root, held.calls, read)


def _read_stream(path: Path) -> tuple[str, Unpickled, dict[str, tuple[int, int]]]:
    """Read what torch before 1.6 wrote: five pickles, then the bytes of the storages; or a pickle of something else.

    Returns:
        The format, what the pickle holds, and where the bytes of each storage begin and how many they are.
    """
    dtypes: dict[str, torch.dtype] = {}

    def load(identity: Any) -> Any:
        if isinstance(identity, tuple) and len(identity) > 1 and identity[0] == "module":
            return identity[1]  # a class, with its source, which is not looked at
        storage = storage_of(identity)
        dtypes.setdefault(storage.key, storage.dtype)
        return storage

    with path.open("rb") as file:
        first = unpickle(file)
        if first.root != LEGACY_MAGIC:
            return "pickle", first, {}
        if unpickle(file).root != LEGACY_PROTOCOL:
            raise NotPickled("it is of a torch that is not known")
        system = unpickle(file).root
        if not isinstance(system, dict) or not system.get("little_endian", True):
            raise NotPickled("it was saved on a machine of the other byte order")
        main = unpickle(file, load)
        return "torch before 1.6", main, _storage_places(file, unpickle(file).root, dtypes)


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
