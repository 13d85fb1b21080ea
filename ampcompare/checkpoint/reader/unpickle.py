"""Read a pickle without running it: what would call something becomes a placeholder that says what it would call.

The machine of the pickle format is small: a stack, a memo and some seventy instructions, two of which (`REDUCE` and its
relatives, and `BUILD`) reach other code. Here they reach a table of builders for plain data and tensors, and nothing
else. Python's own `pickle.Unpickler` could be restricted too, but it reserves memory for what a file only claims to
hold, and builds whatever is asked for; here every object is charged to a `Budget` in proportion to the file.

Source: Python's documentation of `pickletools`, whose parser of instructions is used.
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from ampcompare.checkpoint.reader.budget import ITEM, OBJECT, SLOT, Budget
from ampcompare.checkpoint.reader.builders import BUILDERS, CONSTANTS, Build, require_short
from ampcompare.checkpoint.reader.placeholders import DATA_ONLY, Global, NotPickled, Opaque, StoredTensor

__all__ = ["Unpickled", "unpickle"]

MAX_BYTES = 64 << 20
MAX_BITS = 512
MAX_NAME = 1000
CONTAINER = 250  # an empty container, or the first table of a dict
KEYS = (str, int, float, bool, bytes, type(None), Global, Opaque, StoredTensor)


@dataclass
class Unpickled:
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


def unpickle(file: IO[bytes], persistent: Callable[[Any], Any], budget: Budget) -> Unpickled:
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
                return Unpickled(machine.stack.pop(), list(machine.calls))
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
