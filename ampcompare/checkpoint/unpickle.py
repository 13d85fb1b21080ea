"""Read a pickle without running it: what would call something becomes a placeholder that says what it would call.

The machine of the pickle format is small: a stack, a memo and some seventy instructions, two of which (`REDUCE` and its
relatives, and `BUILD`) reach other code. Here they reach a table of builders for plain data and tensors, and nothing
else. Python's own `pickle.Unpickler` could be restricted too, but it reserves memory for what a file only claims to
hold; here a file is never given more memory than it has bytes, a few objects for each.

Source: Python's documentation of `pickletools`, whose parser of instructions is used.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from ampcompare.checkpoint.builders import BUILDERS, CONSTANTS, Build
from ampcompare.checkpoint.placeholders import DATA_ONLY, Global, NotPickled, Opaque, StoredTensor

__all__ = ["Unpickled", "unpickle"]

MOST_BYTES = 64 << 20
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
    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    calls: dict[str, None] = field(default_factory=dict)

    def mark(self) -> None:
        """Begin to collect items above the stack."""
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
            return build(arguments, self.call)
        if function.name not in DATA_ONLY:
            self.calls[function.name] = None
        return Opaque(function.name, arguments)

    def build(self, target: Any, state: Any) -> None:
        """Give an object its state, as `__setstate__` would."""
        if isinstance(target, Opaque):
            if target.receive is not None:
                target.receive(target, state)
            else:
                target.state = state
        # An OrderedDict brings the metadata of a state dict, a tensor or a set nothing of use.

    def set_items(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, Opaque):  # a subclass of dict
            target.items.extend(zip(items[::2], items[1::2], strict=True))
            return
        if not isinstance(target, dict) or len(items) % 2:
            raise NotPickled("items are set on what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self.key(key)] = value

    def extend(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, Opaque):  # a subclass of list
            target.entries.extend(items)
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise NotPickled("an item is appended to what is no list")

    def key(self, key: Any) -> Any:
        """Return a key that can be hashed without walking deep into it."""
        flat = type(key) is tuple and len(key) < 16 and all(type(part) in KEYS for part in key)
        if flat or type(key) in KEYS:
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
            self.stack.append(tuple(self.top(_TUPLES[name])))
        elif name in _COLLECTED:
            made = _COLLECTED[name](self, self.collected())
            self.stack.append(made)
        elif name in _EMPTY:
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
            self.stack.append(self.call(Global(f"{module}.{attribute}"), arguments))
        elif name == "BUILD":
            state = self.stack.pop()
            self.build(self.stack[-1], state)
        elif name == "ADDITEMS":
            items = [self.key(item) for item in self.collected()]
            if not isinstance(self.stack[-1], set):
                raise NotPickled("an item is added to what is no set")
            self.stack[-1].update(items)
        elif name in ("BINPERSID", "PERSID"):
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
        raise NotPickled("it names an object by what is no text")
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
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _dict_of(machine: _Machine, items: list[Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    machine.set_items(made, items)
    return made


_COLLECTED: Mapping[str, Callable[[_Machine, list[Any]], Any]] = {
    "TUPLE": lambda machine, items: tuple(items),
    "LIST": lambda machine, items: items,
    "DICT": _dict_of,
    "FROZENSET": lambda machine, items: frozenset(machine.key(item) for item in items),
}


def unpickle(file: IO[bytes], persistent: Callable[[Any], Any]) -> Unpickled:
    """Read one pickle from the position of `file`, and leave the position after it.

    Args:
        persistent: gives the object for a persistent id; torch names storages so.

    Raises:
        NotPickled: it is no pickle, or one that no checkpoint needs, or larger than 64 MiB.
    """
    machine = _Machine(persistent)
    memo, step = machine.memo, machine.step
    end = file.tell() + MOST_BYTES
    try:
        argument: Any
        for opcode, argument, position in pickletools.genops(file):
            name = opcode.name
            # the most frequent ones here, without a call
            if name in _LITERALS:
                machine.stack.append(argument)
            elif name in _PUTS:
                memo[argument] = machine.stack[-1]
            elif name in _GETS:
                machine.stack.append(memo[argument])
            elif name == "MARK":
                machine.mark()
            elif name == "MEMOIZE":
                memo[len(memo)] = machine.stack[-1]
            elif name == "STOP":
                return Unpickled(machine.stack.pop(), list(machine.calls))
            else:
                step(name, argument)
            if position is not None and position > end:
                raise NotPickled("its description of what it holds is larger than 64 MiB")
    except NotPickled:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise NotPickled(f"its pickle is broken ({type(error).__name__})") from None
    raise NotPickled("its pickle ends too early")
