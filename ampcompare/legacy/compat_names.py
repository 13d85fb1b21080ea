"""Names that old scripts import and that Python, numpy and torch have since removed."""

from __future__ import annotations

import collections
import collections.abc
import fractions
import importlib
import inspect
import math
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ampcompare.legacy.notes import note

__all__ = ["mend"]

ABSTRACT = [
    "Callable",
    "Container",
    "Hashable",
    "ItemsView",
    "Iterable",
    "Iterator",
    "KeysView",
    "Mapping",
    "MappingView",
    "MutableMapping",
    "MutableSequence",
    "MutableSet",
    "Sequence",
    "Set",
    "Sized",
    "ValuesView",
]
NUMPY = {"float": float, "int": int, "bool": bool, "object": object, "str": str, "complex": complex, "unicode": str}


def mend() -> None:
    """Give modules the names that they have lost; those that are there stay as they are."""
    _add(fractions, {"gcd": (math.gcd, "math.gcd")})
    _add(time, {"clock": (time.perf_counter, "time.perf_counter")})
    _add(inspect, {"getargspec": (_getargspec, "inspect.getfullargspec")})
    _add(collections, {name: (getattr(collections.abc, name), f"collections.abc.{name}") for name in ABSTRACT})
    numpy = importlib.import_module("numpy")
    _add(numpy, {name: (value, name) for name, value in NUMPY.items()})
    sys.meta_path.insert(0, _Finder())


def _getargspec(function: Any) -> tuple[Any, ...]:
    full = inspect.getfullargspec(function)
    return full.args, full.varargs, full.varkw, full.defaults


def _add(module: ModuleType, names: dict[str, tuple[Any, str]]) -> None:
    """Answer for removed names by the module's `__getattr__`, so that nothing is said before one is used."""
    before: Callable[[str], Any] | None = module.__dict__.get("__getattr__")

    def lookup(name: str) -> Any:
        if name in names:
            value, meant = names[name]
            note(f"{module.__name__}.{name} is gone; {meant} stands in for it")
            return value
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__dict__["__getattr__"] = lookup


class _Finder(MetaPathFinder):
    """Makes `torch._six`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torch._six":
            note("torch._six is gone; a module with its names stands in for it")
            return ModuleSpec(fullname, _Six())
        return None


class _Six(Loader):
    """The names that scripts took from `torch._six`."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(
            {
                "PY3": True,
                "PY37": True,
                "container_abcs": collections.abc,
                "inf": math.inf,
                "int_classes": int,
                "nan": math.nan,
                "queue": importlib.import_module("queue"),
                "string_classes": (str, bytes),
            }
        )
