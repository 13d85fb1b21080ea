"""Open a checkpoint of any program, of any torch, and say what it holds, without running anything in it."""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.errors import AmpCompareError, CheckpointError
from ampcompare.base.files.read import FileFault
from ampcompare.base.files.read import open_regular as open_descriptor
from ampcompare.training.checkpoint.reader.placeholders import (
    Global,
    NotPickled,
    Opaque,
    describe_fault,
    holds_only_data,
)
from ampcompare.training.checkpoint.reader.unpickler import require_bounded, storage_of, unpickle

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MAX_DEPTH = 64
LONGEST_SHOWN = 80
MAX_SHOWN = 20


@dataclass(frozen=True)
class Contents:
    """What a file holds."""

    path: Path
    format: str  # "torch archive", "torch before 1.6", "pickle" or "safetensors"
    root: Any  # as `unpickle` gives it
    calls: list[str]  # what unpickling by torch would call beyond plain data and tensors
    comment: bytes = b""  # at the end of an archive

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return self.path.stat().st_size

    def plain(self) -> tuple[Any, list[str]]:
        """Return what the file holds as tensors and plain values, and place and class of what is left out.

        Classes that only hold values, such as `argparse.Namespace`, become dicts of what they hold, and pickled models
        their state dicts.
        """
        left_out: dict[str, str] = {}
        plain = self._convert(self.root, None, left_out, {}, 0)
        return plain, [f"{place}: {name}" for place, name in left_out.items()]

    def _convert(self, value: Any, place: Place, left_out: dict[str, str], seen: dict[int, Any], depth: int) -> Any:
        """Return a value as tensors and plain values, each container once."""
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{self.path} holds values nested deeper than {MAX_DEPTH}; it is not read")
        if isinstance(value, Global):
            left_out[_as_text(place)] = value.name
            return None
        if isinstance(value, Tensor):
            return value.resolve_conj().resolve_neg()
        if not isinstance(value, dict | list | tuple | set | frozenset | Opaque):
            return value
        if id(value) not in seen:
            seen[id(value)] = None  # of what holds itself, the inner one is left out

            def part(item: Any, *names: Any) -> Any:
                return self._convert(item, (place, *names) if names else place, left_out, seen, depth + 1)

            made: Any
            if isinstance(value, dict):
                made = {
                    key if isinstance(key, str | int | float | bool | bytes | None) else str(key): part(item, key)
                    for key, item in value.items()
                }
            elif not isinstance(value, Opaque):
                made = [part(item, index) for index, item in enumerate(value)]
                made = tuple(made) if isinstance(value, tuple) else made
            elif value.value is not None:
                made = value.value
            elif _is_module(value):
                made = {name: part(item, name) for name, item in self._state_dict(value, "", count())}
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

    def _state_dict(self, module: Opaque, prefix: str, visits: Iterator[int]) -> Iterator[tuple[str, Any]]:
        """Yield what `state_dict` of a pickled module has: parameters and persistent buffers, with their names."""
        if next(visits) > self.size:  # modules that hold others many times
            raise CheckpointError(f"{self.path} is damaged: it holds more modules than its size explains")
        state = module.state
        passing = state.get("_non_persistent_buffers_set", ())
        for name, value in {**state["_parameters"], **state["_buffers"]}.items():
            if value is not None and name not in passing:
                yield f"{prefix}{name}", value
        for name, child in state["_modules"].items():
            if _is_module(child):
                yield from self._state_dict(child, f"{prefix}{name}.", visits)


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


def _is_module(value: Any) -> bool:
    return (
        isinstance(value, Opaque)
        and isinstance(value.state, dict)
        and all(isinstance(value.state.get(key), dict) for key in ("_parameters", "_buffers", "_modules"))
    )


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
    """Open a file for reading; a pipe would block until a writer opens it."""
    try:
        return os.fdopen(open_descriptor(path), "rb")
    except FileFault as fault:
        raise CheckpointError(f"cannot read the checkpoint {path}: {fault}") from None


def open_foreign(path: Path) -> Contents:
    """Open a checkpoint: an archive of torch, a file of torch before 1.6, a plain pickle, or safetensors."""
    with name_faults(path):
        with open_regular(path) as file:
            head = file.read(512)
        if not head:
            raise CheckpointError(f"{path} is empty; take the checkpoint before it")
        if head.startswith(b"PK\x03\x04"):
            return _open_archive(path)
        if head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] < path.stat().st_size:
            from safetensors.torch import load_file

            return Contents(path, "safetensors", load_file(path), [])
        if not head.startswith(b"\x80"):
            raise CheckpointError(f"{path} is not a checkpoint: it is neither an archive nor a pickle")
        require_bounded(lambda: _read_stream(path, "meta"), path.stat().st_size)
        return Contents(path, *_read_stream(path, "cpu"))
    raise AssertionError


def _open_archive(path: Path) -> Contents:
    """Check that an archive is one of torch.save, and read it."""
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

    def load(read: Callable[[str], Tensor]) -> tuple[Any, list[str]]:
        storages: dict[str, Tensor] = {}

        def storage(identity: Any) -> Tensor:
            key, dtype, _ = storage_of(identity)
            if key not in storages:
                content = read(f"{folder}/data/{key}")
                storages[key] = content[: len(content) // dtype.itemsize * dtype.itemsize].view(dtype)
            return storages[key]

        return unpickle(io.BytesIO(pickled), storage)

    def outline(name: str) -> Tensor:
        return torch.empty(members[name].file_size, dtype=torch.uint8, device="meta")

    require_bounded(lambda: load(outline), path.stat().st_size)
    return Contents(path, "torch archive", *load(lambda name: as_tensor(archive.read(name))), comment=archive.comment)


def _read_stream(path: Path, device: str) -> tuple[str, Any, list[str]]:
    """Read what torch before 1.6 wrote: five pickles, then the bytes of the storages; or a pickle of something else.

    Returns the format, what the pickle holds, and what it would call. The device "meta" leaves the bytes unread.
    """
    size = path.stat().st_size
    storages: dict[str, Tensor] = {}

    def load(identity: Any) -> Any:
        if isinstance(identity, tuple) and len(identity) > 1 and identity[0] == "module":
            return identity[1]  # a class, with its source, which is not looked at
        key, dtype, count = storage_of(identity)
        if not 0 <= count * dtype.itemsize <= size:
            raise NotPickled("it was cut off: a storage reaches beyond its end")
        return storages.setdefault(key, torch.empty(count, dtype=dtype, device=device))

    with path.open("rb") as file:
        first, calls = unpickle(file)
        if first != LEGACY_MAGIC:
            return "pickle", first, calls
        if unpickle(file)[0] != LEGACY_PROTOCOL:
            raise NotPickled("it is of a torch that is not known")
        system, _ = unpickle(file)
        if not isinstance(system, dict) or not system.get("little_endian", True):
            raise NotPickled("it was saved on a machine of the other byte order")
        main, calls = unpickle(file, load)
        for key in unpickle(file)[0]:  # the number of elements in 8 bytes, then the elements
            (count,) = struct.unpack("<q", file.read(8))
            storage = storages[key]
            if count != len(storage) or file.tell() + storage.nbytes > size:
                raise NotPickled("it was cut off: a storage reaches beyond its end")
            if device == "meta":
                file.seek(storage.nbytes, 1)
            else:
                file.readinto(storage.view(torch.uint8).numpy().data)
        return "torch before 1.6", main, calls


def as_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor of them, in memory of its own."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
