"""Open a checkpoint of any program, of any torch, and say what it holds, without running anything in it."""

from __future__ import annotations

import datetime
import io
import os
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import count
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ampcompare.base.errors import AmpCompareError, CheckpointError
from ampcompare.base.files.read import FileFault
from ampcompare.base.files.read import open_regular_file as open_descriptor
from ampcompare.checkpoints.reader.placeholders import (
    NotPickled,
    OpaqueObject,
    PlaceholderMetaclass,
    fault_text_of_exception,
    is_class_of_plain_data,
)
from ampcompare.checkpoints.reader.unpickler import (
    DefaultDictPlaceholder,
    DequePlaceholder,
    parse_storage_key_type_and_count,
    require_readable_in_bounded_child,
    unpickled_value_and_calls,
)

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MAX_DEPTH = 64
LONGEST_SHOWN = 80
MAX_SHOWN = 20
MAX_SIBLINGS = 3  # of one class in one container that are named one by one
LONGEST_LINE = 300


class PlainContents(NamedTuple):
    """What a file holds, of tensors and values that `torch.load` reads with its defaults."""

    value: Any
    left_out: list[str]  # place and class of each object that no such value stands for
    changed: list[str]  # places, class and new form of what is held as another class


@dataclass(frozen=True)
class FileContents:
    """A checkpoint file as it was read: its format, its unpickled content, and what unpickling by torch would call."""

    path: Path
    format: str  # "torch archive", "torch before 1.6", "pickle" or "safetensors"
    root: Any  # as `unpickled_value_and_calls` gives it
    calls: list[str]  # what unpickling by torch would call beyond plain data and tensors
    comment: bytes = b""  # at the end of an archive

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return self.path.stat().st_size

    def plain_contents(self) -> PlainContents:
        """Return what the file holds as tensors and plain values: nothing else passes `torch.load(weights_only=True)`.

        Classes that only hold values, such as `argparse.Namespace`, become dicts of what they hold, and pickled models
        their state dicts.
        """
        reader = _PlainReader(self.path, self.size)
        value = reader.convert_value(self.root, None, 0)
        left_out = [f"{_place_text(place)}: {name}" for place, name in reader.left_out]
        return PlainContents(value, left_out, list(_lines_on_converted_places(reader.changed)))


class _PlainReader:
    """Turns an unpickled value into tensors and plain values, each container once, and notes what changes."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.left_out: list[tuple[Place, str]] = []
        self.changed: list[tuple[Place, str, str]] = []  # place, class, form
        self.seen: dict[int, Any] = {}
        self.open: set[int] = set()

    def convert_value(self, value: Any, place: Place, depth: int) -> Any:
        """Return a value of the file as tensors and plain values."""
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{self.path} holds values nested deeper than {MAX_DEPTH}; it is not read")
        if isinstance(value, PlaceholderMetaclass):
            self.left_out.append((place, value.name))
            return None
        if isinstance(value, Tensor):
            return value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value
        if not isinstance(value, dict | list | tuple | set | frozenset | OpaqueObject):
            return value
        if id(value) in self.open:
            self.left_out.append((place, "what it lies in, once more"))
            return None
        if id(value) not in self.seen:
            self.open.add(id(value))
            if isinstance(value, OpaqueObject):
                self.seen[id(value)] = self._convert_object(value, place, depth + 1)
            else:
                self.seen[id(value)] = self._convert_container(value, place, depth + 1)
            self.open.remove(id(value))
        return self.seen[id(value)]

    def _convert_container(self, value: Any, place: Place, depth: int) -> Any:
        if isinstance(value, dict):
            made = self._convert_mapping(value, place, depth)
            if isinstance(value, DefaultDictPlaceholder):
                self.changed.append((place, "collections.defaultdict", "a dict"))
            elif isinstance(value, Counter):
                return Counter(made)
            elif isinstance(value, OrderedDict):
                held = OrderedDict(made)
                # the versions of modules, `_metadata`, which a state dict carries and `load_state_dict` reads
                vars(held).update(self._convert_mapping(vars(value), (place, "(attributes)"), depth))
                return held
            return made
        items = [self.convert_value(item, (place, index), depth) for index, item in enumerate(value)]
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, tuple):
            return tuple(items)
        if isinstance(value, list):
            if isinstance(value, DequePlaceholder):
                self.changed.append((place, "collections.deque", "a list"))
            return items
        if not all(isinstance(item, Hashable) and _is_hashable_key(item) for item in items):
            self.changed.append((place, type(value).__name__, "a list"))
            return items
        if isinstance(value, frozenset):
            self.changed.append((place, "frozenset", "a set"))
        return set(items)

    def _convert_mapping(self, value: Mapping[Any, Any], place: Place, depth: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, item in value.items():
            own = key if _is_hashable_key(key) else self.convert_value(key, (place, "(a key)"), depth)
            if not _is_hashable_key(own):
                own = str(key)
                self.changed.append(((place, own), f"a key of class {_class_name(key)}", "text"))
            if own in made:
                self.left_out.append(
                    ((place, own), f"a second entry, under a key of class {_class_name(key)}")
                )
                continue
            made[own] = self.convert_value(item, (place, own), depth)
        return made

    def _convert_object(self, value: OpaqueObject, place: Place, depth: int) -> Any:
        if value.value is not None:
            made = value.value
            if isinstance(made, numpy.dtype):
                made = made.str
            made = self.convert_value(made, place, depth)
            self.changed.append((place, value.name, _form_of_value_text(made)))
            return made
        if _is_pickled_module(value):
            made = {
                name: self.convert_value(item, (place, name), depth)
                for name, item in self._entries_of_pickled_module(value, "", count())
            }
            self.changed.append((place, value.name, "its state dict"))
            return made
        if not is_class_of_plain_data(value.name):
            self.left_out.append((place, value.name))
            return None
        if isinstance(value.state, dict):
            made = self.convert_value(value.state, place, depth)
        else:
            made = _value_of_standard_library_object(value.name, value.arguments)
            if made is None:
                made = [self.convert_value(item, place, depth) for item in value.arguments]
        self.changed.append((place, value.name, _form_of_value_text(made)))
        return made

    def _entries_of_pickled_module(
        self, module: OpaqueObject, prefix: str, visits: Iterator[int]
    ) -> Iterator[tuple[str, Any]]:
        """Yield what `state_dict` of a pickled module has: parameters and persistent buffers, with their names."""
        if next(visits) > self.size:  # modules that hold others many times
            raise CheckpointError(f"{self.path} is damaged: it holds more modules than its size explains")
        state = module.state
        passing = state.get("_non_persistent_buffers_set", ())
        for name, value in {**state["_parameters"], **state["_buffers"]}.items():
            if value is not None and name not in passing:
                yield f"{prefix}{name}", value
        for name, child in state["_modules"].items():
            if _is_pickled_module(child):
                yield from self._entries_of_pickled_module(child, f"{prefix}{name}.", visits)


Place = tuple[Any, Any] | None
"""Where something lies: the place of what holds it, and its key there. Joined only to be shown, as places are many."""
KEY_CLASSES = (str, int, float, bool, bytes, complex, torch.dtype, torch.device, torch.Size)


def _place_text(place: Place) -> str:
    """Return a place as text, with only the outermost and innermost keys if there are many."""
    keys: list[str] = []
    while place is not None:
        place, key = place
        keys.append(str(key)[:LONGEST_SHOWN])
    keys.reverse()
    if len(keys) > MAX_SHOWN:
        keys[MAX_SHOWN // 2 : -MAX_SHOWN // 2] = ["…"]
    return ".".join(keys) or "the whole file"


def _is_pickled_module(value: Any) -> bool:
    return (
        isinstance(value, OpaqueObject)
        and isinstance(value.state, dict)
        and all(isinstance(value.state.get(key), dict) for key in ("_parameters", "_buffers", "_modules"))
    )


def _is_hashable_key(value: Any) -> bool:
    """Return whether a value is kept as it is where a dict or a set needs one that can be hashed."""
    if type(value) is tuple:
        return all(map(_is_hashable_key, value))
    return value is None or type(value) in KEY_CLASSES


def _class_name(value: Any) -> str:
    return value.name if isinstance(value, OpaqueObject) else type(value).__name__


def _form_of_value_text(value: Any) -> str:
    """Return what a value has become, in words: a dict, a list, text, a plain tensor."""
    names = {dict: "a dict", OrderedDict: "a dict", list: "a list", str: "text", set: "a set", bool: "a bool"}
    if isinstance(value, Tensor):
        return "a plain parameter" if isinstance(value, torch.nn.Parameter) else "a plain tensor"
    return names.get(type(value), "a number")


def _value_of_standard_library_object(name: str, arguments: tuple[Any, ...]) -> str | float | None:
    """Return the value of an object of the standard library as text or a number; None if it is of another kind."""
    kind = name.rpartition(".")[2]
    try:
        if name.startswith("pathlib."):
            return str((PureWindowsPath if "Windows" in kind else PurePosixPath)(*arguments))
        if kind in ("Decimal", "Fraction"):
            return "/".join(map(str, arguments))
        if kind == "timedelta":
            return datetime.timedelta(*arguments).total_seconds()
        if kind == "timezone":
            return str(_timezone_of_offset(arguments[0]))
        if kind in ("date", "time", "datetime"):
            packed = arguments[0].encode("latin-1") if isinstance(arguments[0], str) else bytes(arguments[0])
            zone = [
                _timezone_of_offset(item.arguments[0])
                for item in arguments[1:]
                if item.name == "datetime.timezone"
            ]
            if len(zone) < len(arguments) - 1:
                return None
            made: Any = getattr(datetime, kind)(packed, *zone)
            return str(made.isoformat())
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError):
        return None
    return None


def _timezone_of_offset(offset: Any) -> datetime.timezone:
    return datetime.timezone(datetime.timedelta(*offset.arguments))


def _lines_on_converted_places(changed: list[tuple[Place, str, str]]) -> Iterator[str]:
    """Yield lines that name all places of what is held as another class; many siblings by what holds them."""
    siblings = Counter((id(place[0]) if place else 0, name, form) for place, name, form in changed)
    shown: dict[tuple[str, str], dict[str, None]] = {}
    for place, name, form in changed:
        number = siblings[id(place[0]) if place else 0, name, form]
        text = _place_text(place)
        if place and number > MAX_SIBLINGS:
            text = f"{number} values in {_place_text(place[0])}"
        shown.setdefault((name, form), {})[text] = None
    for (name, form), places in shown.items():
        line = ""
        for text in places:
            if line and len(line) + len(text) > LONGEST_LINE:
                yield f"{line}: {name} as {form}"
                line = ""
            line += f", {text}" if line else text
        yield f"{line}: {name} as {form}"


@contextmanager
def translate_parser_errors(path: Path) -> Iterator[None]:
    """Turn whatever a parser raises on bytes that are not what they claim into one line about the file.

    Raises:
        CheckpointError: the file is damaged, no pickle, or cannot be read.
    """
    try:
        yield
    except AmpCompareError:
        raise
    except NotPickled as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except Exception as error:  # zipfile alone raises a dozen kinds on damaged archives, few of them its own
        if isinstance(error, OSError) and error.strerror:
            raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}") from None
        raise CheckpointError(f"{path} is damaged: {fault_text_of_exception(error)}") from None


def open_regular_file(path: Path) -> BufferedReader:
    """Open a file for reading; a pipe would block until a writer opens it."""
    try:
        return os.fdopen(open_descriptor(path), "rb")
    except FileFault as fault:
        raise CheckpointError(f"cannot read the checkpoint {path}: {fault}") from None


def open_checkpoint(path: Path) -> FileContents:
    """Open a checkpoint: an archive of torch, a file of torch before 1.6, a plain pickle, or safetensors."""
    with translate_parser_errors(path):
        with open_regular_file(path) as file:
            head = file.read(512)
        if not head:
            raise CheckpointError(f"{path} is empty; take the checkpoint before it")
        if head.startswith(b"PK\x03\x04"):
            return _open_archive(path)
        if head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] < path.stat().st_size:
            from safetensors.torch import load_file

            return FileContents(path, "safetensors", load_file(path), [])
        if not head.startswith(b"\x80"):
            raise CheckpointError(f"{path} is not a checkpoint: it is neither an archive nor a pickle")
        require_readable_in_bounded_child(
            lambda: _read_legacy_file_or_pickle(path, "meta"), path.stat().st_size
        )
        return FileContents(path, *_read_legacy_file_or_pickle(path, "cpu"))
    raise AssertionError


def _open_archive(path: Path) -> FileContents:
    """Check that an archive is one of torch.save, and read it."""
    archive = zipfile.ZipFile(path)
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                f"{path} is not an archive of torch.save: {info.filename[:40]!r} is compressed"
            )
    members = {info.filename: info for info in archive.infolist()}
    descriptions = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(descriptions) != 1:
        raise CheckpointError(f"{path} is an archive, and none that torch.save wrote: it has no data.pkl")
    folder = descriptions[0].partition("/")[0]
    if f"{folder}/constants.pkl" in members:
        raise CheckpointError(f"{path} is a TorchScript program; give the checkpoint that it was made from")
    order = f"{folder}/byteorder"
    if order in members and _read_archive_member(path, archive, order) != sys.byteorder.encode():
        raise CheckpointError(
            f"{path} was saved on a machine with the other byte order, which cannot be read here; "
            f"save it again on a machine like this one"
        )
    pickled = _read_archive_member(path, archive, descriptions[0])

    def load_with(read: Callable[[str], Tensor]) -> tuple[Any, list[str]]:
        storages: dict[str, Tensor] = {}

        def read_storage(identity: Any) -> Tensor:
            key, dtype, _ = parse_storage_key_type_and_count(identity)
            if key not in storages:
                content = read(f"{folder}/data/{key}")
                storages[key] = content[: len(content) // dtype.itemsize * dtype.itemsize].view(dtype)
            return storages[key]

        return unpickled_value_and_calls(io.BytesIO(pickled), read_storage)

    def make_storage_without_values(name: str) -> Tensor:
        return torch.empty(members[name].file_size, dtype=torch.uint8, device="meta")

    require_readable_in_bounded_child(lambda: load_with(make_storage_without_values), path.stat().st_size)
    root, calls = load_with(lambda name: tensor_of_bytes(_read_archive_member(path, archive, name)))
    return FileContents(path, "torch archive", root, calls, comment=archive.comment)


def _read_archive_member(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the bytes of a member of an archive, with the check of their checksum, if the archive has checksums."""
    if not any(info.CRC for info in archive.infolist()):  # torch.serialization.set_crc32_options(False)
        info = archive.getinfo(name)
        with path.open("rb") as file:
            file.seek(info.header_offset + 26)
            name_size, extra_size = struct.unpack("<HH", file.read(4))
            file.seek(name_size + extra_size, os.SEEK_CUR)
            content = file.read(info.file_size)
        if len(content) != info.file_size:
            raise CheckpointError(f"{path} was cut off: it ends before the last byte of {name}")
        return content
    try:
        return archive.read(name)
    except zipfile.BadZipFile as error:
        part = "the values of a tensor" if "/data/" in name else "its description of what it holds"
        raise CheckpointError(
            f"{path} is damaged in {part} ({name}): {fault_text_of_exception(error)}; take the checkpoint before it"
        ) from None


def _read_legacy_file_or_pickle(path: Path, device: str) -> tuple[str, Any, list[str]]:
    """Read what torch before 1.6 wrote: five pickles, then the bytes of the storages; or a pickle of something else.

    Returns the format, what the pickle holds, and what it would call. The device "meta" leaves the bytes unread.
    """
    size = path.stat().st_size
    storages: dict[str, Tensor] = {}

    def load_storage(identity: Any) -> Any:
        if isinstance(identity, tuple) and len(identity) > 1 and identity[0] == "module":
            return identity[1]  # a class, with its source, which is not looked at
        key, dtype, count = parse_storage_key_type_and_count(identity)
        if not 0 <= count * dtype.itemsize <= size:
            raise NotPickled("it was cut off: a storage reaches beyond its end")
        return storages.setdefault(key, torch.empty(count, dtype=dtype, device=device))

    with path.open("rb") as file:
        first, calls = unpickled_value_and_calls(file)
        if first != LEGACY_MAGIC:
            return "pickle", first, calls
        if unpickled_value_and_calls(file)[0] != LEGACY_PROTOCOL:
            raise NotPickled("it is of a torch that is not known")
        system, _ = unpickled_value_and_calls(file)
        if not isinstance(system, dict) or not system.get("little_endian", True):
            raise NotPickled("it was saved on a machine of the other byte order")
        main, calls = unpickled_value_and_calls(file, load_storage)
        for key in unpickled_value_and_calls(file)[0]:  # the number of elements in 8 bytes, then the elements
            (count,) = struct.unpack("<q", file.read(8))
            storage = storages[key]
            if count != len(storage) or file.tell() + storage.nbytes > size:
                raise NotPickled("it was cut off: a storage reaches beyond its end")
            if device == "meta":
                file.seek(storage.nbytes, 1)
            else:
                file.readinto(storage.view(torch.uint8).numpy().data)
        return "torch before 1.6", main, calls


def tensor_of_bytes(data: bytes) -> Tensor:
    """Return bytes as a tensor of them, in memory of its own."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
