"""Open a checkpoint of any program, of any torch, and say what it holds, without running anything in it.

The machine of the pickle format is small: a stack, a memo and some seventy instructions, two of which (`REDUCE` and its
relatives, and `BUILD`) reach other code. Here they reach a table of builders for plain data and tensors, and nothing
else. Python's own `pickle.Unpickler` could be restricted too, but it reserves memory for what a file only claims to
hold, and builds whatever is asked for; here every object is charged to a `Budget` in proportion to the file.

Source: Python's documentation of `pickletools`, whose parser of instructions is used.
"""

from __future__ import annotations

import errno
import io
import os
import pickletools
import stat
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ampcompare.base.errors import AmpCompareError, CheckpointError
from ampcompare.training.checkpoint.reader.budget import ITEM, OBJECT, SLOT, TENSOR, Budget, open_archive
from ampcompare.training.checkpoint.reader.builders import (
    BUILDERS,
    CONSTANTS,
    Build,
    Storage,
    require_short,
    storage_dtype,
)
from ampcompare.training.checkpoint.reader.placeholders import (
    DATA_ONLY,
    LOGS,
    Global,
    NotPickled,
    Opaque,
    StoredTensor,
    describe_fault,
)

__all__ = ["Contents", "as_tensor", "explained", "open_foreign", "open_members", "open_regular", "unpickle"]

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MAX_DEPTH = 64
LONGEST_SHOWN = 80
MAX_SHOWN = 20
_WALKED = (dict, list, tuple, Opaque, Global)
MAX_BYTES = 64 << 20
MAX_BITS = 512
MAX_NAME = 1000
CONTAINER = 250  # an empty container, or the first table of a dict
KEYS = (str, int, float, bool, bytes, type(None), Global, Opaque, StoredTensor)
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_CONTAINERS = (list, tuple, dict, set, frozenset)
_DATA = (str, bytes, bytearray)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


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
        if (stored.offset + reach) * stored.dtype.itemsize > held.nbytes:
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
            if value.name in DATA_ONLY:
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
                if value.name not in DATA_ONLY:
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
    """Open a file for reading; a FIFO would block until a writer opens it.

    Raises:
        CheckpointError: it is a FIFO, a socket or a device.
        OSError: it cannot be opened, or is a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    kind = "a FIFO" if stat.S_ISFIFO(mode) else "not a regular file"
    raise CheckpointError(f"{path} is {kind}, but a checkpoint needs random access; write it to a file first")


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


def _persistent(note: Callable[[Storage], None]) -> Callable[[Any], Storage]:
    """Return the reader of torch's persistent ids: ("storage", class, key, device, elements)."""

    def load(identity: Any) -> Storage:
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            raise NotPickled("it refers to something outside that is not a storage")
        storage = Storage(identity[2], storage_dtype(identity[1]), identity[4], identity[3])
        note(storage)
        return storage

    return load


def _open_archive(path: Path) -> Contents:
    budget = Budget(path.stat().st_size)
    archive = open_archive(path, budget)
    return open_members(path, archive, lambda name: as_tensor(archive.read(name)), budget)


def open_members(path: Path, archive: zipfile.ZipFile, read: Callable[[str], Tensor], budget: Budget) -> Contents:
    """Check that an archive is one of torch.save, and read its pickle.

    Args:
        read: gives the bytes of a member.

    Raises:
        CheckpointError: it is an archive of something else.
        NotPickled: its pickle is broken.
    """
    members = {info.filename: info for info in archive.infolist()}
    descriptions = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(descriptions) != 1:
        raise CheckpointError(f"{path} is an archive, and none that torch.save wrote: it has no data.pkl")
    folder = descriptions[0].partition("/")[0]
    if f"{folder}/constants.pkl" in members:
        raise CheckpointError(f"{path} is a TorchScript program; give the checkpoint that it was made from")
    order = f"{folder}/byteorder"
    if order in members and bytes(read(order).numpy()) != sys.byteorder.encode():
        raise CheckpointError(
            f"{path} was saved on a machine with the other byte order, which cannot be read here; "
            f"save it again on a machine like this one"
        )
    description = unpickle(io.BytesIO(bytes(read(descriptions[0]).numpy())), _persistent(lambda storage: None), budget)
    return Contents(
        path,
        "torch archive",
        description.root,
        description.calls,
        lambda key: read(f"{folder}/data/{key}"),
        archive.comment,
    )


def _open_stream(path: Path) -> Contents:
    """Open what torch before 1.6 wrote: five pickles, then the bytes of the storages; or a pickle of something else."""
    storages: dict[str, Storage] = {}

    def note(storage: Storage) -> None:
        storages.setdefault(storage.key, storage)

    def refuse(identity: Any) -> Any:
        raise NotPickled("it refers to something outside")

    budget = Budget(path.stat().st_size)
    with path.open("rb") as file:
        first = unpickle(file, refuse, budget)
        if first.root != LEGACY_MAGIC:
            return Contents(path, "pickle", first.root, first.calls, _nothing_stored)
        if unpickle(file, refuse, budget).root != LEGACY_PROTOCOL:
            raise NotPickled("it is of a torch that is not known")
        system = unpickle(file, refuse, budget).root
        if not isinstance(system, dict) or not system.get("little_endian", True):
            raise NotPickled("it was saved on a machine of the other byte order")
        main = unpickle(file, _legacy_persistent(note), budget)
        keys = unpickle(file, refuse, budget).root
        places = _storage_places(file, keys, storages)

    def read(key: str) -> Tensor:
        at, length = places[key]
        with path.open("rb") as again:
            again.seek(at)
            return as_tensor(again.read(length))

    return Contents(path, "torch before 1.6", main.root, main.calls, read)


def _legacy_persistent(note: Callable[[Storage], None]) -> Callable[[Any], Any]:
    load = _persistent(note)

    def load_either(identity: Any) -> Any:
        if isinstance(identity, tuple) and len(identity) > 1 and identity[0] == "module":
            return identity[1]  # a class, with its source, which is not looked at
        return load(identity)

    return load_either


def _storage_places(file: IO[bytes], keys: Any, storages: dict[str, Storage]) -> dict[str, tuple[int, int]]:
    """Find the bytes of each storage: its number of elements in 8 bytes, then the elements."""
    if not isinstance(keys, list):
        raise NotPickled("it has no list of its storages")
    places = {}
    at = file.tell()
    end = file.seek(0, 2)
    for key in keys:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None:
            raise NotPickled("it lists a storage that nothing uses")
        file.seek(at)
        (count,) = struct.unpack("<q", file.read(8))
        length = count * storage.dtype.itemsize
        if count < 0 or at + 8 + length > end:
            raise NotPickled("it was cut off: a storage reaches beyond its end")
        places[key] = (at + 8, length)
        at += 8 + length
    return places


def as_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor of them, in memory of its own."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _nothing_stored(key: str) -> Tensor:
    raise NotPickled("a pickle of its own stores no tensors")


def _open_safetensors(path: Path) -> Contents:
    from safetensors import safe_open

    budget = Budget(path.stat().st_size)
    with safe_open(path, framework="pt") as file:
        budget.charge(TENSOR * len(file.keys()))
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Contents(path, "safetensors", weights, [], _nothing_stored)


@dataclass
class _Unpickled:
    """What a pickle holds.

    Attributes:
        root: dicts, lists, tuples, sets, plain values, `StoredTensor`, `Global` and `Opaque`.
        calls: names of what unpickling would call, beyond plain data and tensors, each once, in order.
    """

    root: Any
    calls: list[str]


@dataclass
class _Machine:
    persistent: Callable[[Any], Any]
    budget: Budget
    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    calls: dict[str, None] = field(default_factory=dict)

    def mark(self) -> None:
        """Begin to collect items above the stack."""
        self.budget.charge(CONTAINER)
        self.below.append(self.stack)
        self.stack = []

    def collected(self) -> list[Any]:
        """Return the items since the last mark, which is taken away."""
        items = self.stack
        self.stack = self.below.pop()
        return items

    def call(self, function: Any, arguments: Any, *, keywords: Any = None) -> Any:
        """Build plain data and tensors; put a placeholder for all else."""
        if not isinstance(function, Global):
            raise NotPickled(f"it calls a {type(function).__name__}")
        if not isinstance(arguments, tuple):
            raise NotPickled(f"it calls {function.name} with a {type(arguments).__name__}")
        build: Build | None = BUILDERS.get(function.name)
        if build is not None and not keywords:
            # what a builder makes of an argument has at most an entry for each of its items
            for argument in arguments:
                self.budget.charge(ITEM * len(argument) if isinstance(argument, _CONTAINERS) else SLOT)
                self.budget.charge(len(argument) if isinstance(argument, _DATA) else 0)
            made = build(arguments, self.call)
            if not any(made is argument for argument in arguments):
                self.budget.charge_object(made)
            return made
        if function.name not in DATA_ONLY:
            self.calls[function.name] = None
        self.budget.charge(OBJECT)
        return Opaque(function.name, arguments)

    def build(self, target: Any, state: Any) -> None:
        """Give an object its state, as `__setstate__` would."""
        if isinstance(target, Opaque):
            if target.receive is not None:
                target.receive(target, state)
                self.budget.charge_value(target.value)
            else:
                target.state = state
        # An OrderedDict brings the metadata of a state dict, a tensor or a set nothing of use.

    def set_items(self, target: Any, items: list[Any]) -> None:
        self.budget.charge(CONTAINER + ITEM * len(items))
        if isinstance(target, Opaque):  # a subclass of dict
            target.items.extend(zip(items[::2], items[1::2], strict=True))
            return
        if not isinstance(target, dict) or len(items) % 2:
            raise NotPickled("items are set on something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self.key(key)] = value

    def extend(self, target: Any, items: list[Any]) -> None:
        self.budget.charge(SLOT * len(items))
        if isinstance(target, Opaque):  # a subclass of list
            target.entries.extend(items)
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise NotPickled("an item is appended to something that is not a list")

    def key(self, key: Any) -> Any:
        """Return a key that can be hashed without walking deep into it."""
        flat = type(key) is tuple and len(key) < 16 and all(type(part) in KEYS for part in key)
        if flat or type(key) in KEYS:
            for part in key if flat else (key,):
                require_short(part)
            return key
        raise NotPickled(f"a key of a dict or a member of a set is a {type(key).__name__}")

    def top(self, count: int) -> list[Any]:
        """Take away the last `count` items."""
        if count > len(self.stack):
            raise NotPickled("an instruction lacks its values")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def step(self, name: str, argument: Any) -> None:
        """Carry out the instructions that build containers."""
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self.budget.charge(CONTAINER)
            self.stack.append(tuple(self.top(_TUPLES[name])))
        elif name in _COLLECTED:
            items = self.collected()
            self.budget.charge(SLOT * len(items))
            self.stack.append(_COLLECTED[name](self, items))
        elif name in _EMPTY:
            self.budget.charge(CONTAINER)
            self.stack.append(_EMPTY[name]())
        elif name in ("SETITEM", "SETITEMS"):
            items = self.collected() if name == "SETITEMS" else self.top(2)
            self.set_items(self.stack[-1], items)
        elif name in ("APPEND", "APPENDS"):
            items = self.collected() if name == "APPENDS" else self.top(1)
            self.extend(self.stack[-1], items)
        else:
            self.reach(name, argument)

    def reach(self, name: str, argument: Any) -> None:
        """Carry out the instructions that name, call or change objects, and the rare ones."""
        if name in ("GLOBAL", "STACK_GLOBAL"):
            module, attribute = self.top(2) if name == "STACK_GLOBAL" else argument.split(" ")
            self.budget.charge(OBJECT)
            self.stack.append(_global(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            function, arguments = self.top(2)
            self.stack.append(self.call(function, arguments))
        elif name == "NEWOBJ_EX":
            function, arguments, keywords = self.top(3)
            self.stack.append(self.call(function, arguments, keywords=keywords))
        elif name == "OBJ":
            function, *rest = self.collected()
            self.stack.append(self.call(function, tuple(rest)))
        elif name == "INST":
            module, attribute = argument.split(" ")
            arguments = tuple(self.collected())
            self.budget.charge(OBJECT)
            self.stack.append(self.call(_global(module, attribute), arguments))
        elif name == "BUILD":
            state = self.stack.pop()
            self.build(self.stack[-1], state)
        elif name == "ADDITEMS":
            items = [self.key(item) for item in self.collected()]
            self.budget.charge(ITEM * len(items))
            if not isinstance(self.stack[-1], set):
                raise NotPickled("an item is added to something that is not a set")
            self.stack[-1].update(items)
        elif name in ("BINPERSID", "PERSID"):
            self.budget.charge(OBJECT)
            self.stack.append(self.persistent(self.stack.pop() if name == "BINPERSID" else argument))
        elif name == "POP":
            self.stack.pop() if self.stack else self.collected()
        elif name == "POP_MARK":
            self.collected()
        elif name == "DUP":
            self.stack.append(self.stack[-1])
        elif name not in ("PROTO", "FRAME"):
            raise NotPickled(f"it uses the instruction {name}, which no checkpoint needs")


def _global(module: Any, attribute: Any) -> Any:
    if not isinstance(module, str) or not isinstance(attribute, str):
        raise NotPickled("it names an object by something that is not text")
    if len(module) + len(attribute) > MAX_NAME:
        raise NotPickled(f"it names an object by {len(module) + len(attribute)} characters")
    name = f"{module}.{attribute}"
    return CONSTANTS.get(name) or Global(name)


def _dict_of(machine: _Machine, items: list[Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    machine.set_items(made, items)
    return made


_COLLECTED: Mapping[str, Callable[[_Machine, list[Any]], Any]] = {
    "TUPLE": lambda machine, items: tuple(items),
    "LIST": lambda machine, items: items,
    "DICT": _dict_of,
    "FROZENSET": lambda machine, items: _frozenset_of(machine, items),
}


def _frozenset_of(machine: _Machine, items: list[Any]) -> frozenset[Any]:
    machine.budget.charge(CONTAINER + ITEM * len(items))
    return frozenset(machine.key(item) for item in items)


class _Limited:
    """The part of a file that a pickle may take, as `pickletools` reads it: no read reserves more than is there."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        begin = file.tell()
        held = file.seek(0, 2) - begin
        self.left = min(held, MAX_BYTES)
        self.is_cut = held > MAX_BYTES
        file.seek(begin)

    def read(self, count: int) -> bytes:
        return self._counted(self._file.read(count if count < self.left else self.left))

    def readline(self) -> bytes:
        return self._counted(self._file.readline(self.left))

    def _counted(self, data: bytes) -> bytes:
        self.left -= len(data)
        return data


def unpickle(file: IO[bytes], persistent: Callable[[Any], Any], budget: Budget) -> _Unpickled:
    """Read one pickle from the position of `file`, and leave the position after it.

    Args:
        persistent: gives the object for a persistent id; torch names storages so.
        budget: of the file, from which all that is built is taken.

    Raises:
        NotPickled: it is not a pickle, or not one of a checkpoint, or larger than 64 MiB, or above its budget.
    """
    machine = _Machine(persistent, budget)
    memo, step = machine.memo, machine.step
    limited = _Limited(file)
    try:
        argument: Any
        for opcode, argument, _ in pickletools.genops(limited):  # type: ignore[arg-type]
            name = opcode.name
            budget.step()
            # the most frequent ones here, without a call
            if name in _LITERALS:
                if type(argument) is int and argument.bit_length() > MAX_BITS:
                    raise NotPickled(f"it holds an integer of {argument.bit_length()} bits, which no checkpoint needs")
                budget.charge(sys.getsizeof(argument) + SLOT)
                machine.stack.append(argument)
            elif name in _PUTS:
                budget.charge(ITEM)
                memo[argument] = machine.stack[-1]
            elif name in _GETS:
                budget.charge(SLOT)
                machine.stack.append(memo[argument])
            elif name == "MARK":
                machine.mark()
            elif name == "MEMOIZE":
                budget.charge(ITEM)
                memo[len(memo)] = machine.stack[-1]
            elif name == "STOP":
                return _Unpickled(machine.stack.pop(), list(machine.calls))
            else:
                budget.charge(SLOT)
                step(name, argument)
    except NotPickled:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        if limited.is_cut and not limited.left:
            raise NotPickled("its description of what it holds is larger than 64 MiB") from None
        raise NotPickled(f"its pickle is broken ({type(error).__name__})") from None
    raise NotPickled("its pickle ends too early")
