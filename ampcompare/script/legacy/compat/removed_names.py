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

from ampcompare.script.legacy.stderr import note

__all__ = ["patch"]

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
NUMPY = {
    "float": (float, "float"),
    "int": (int, "int"),
    "long": (int, "int"),
    "bool": (bool, "bool"),
    "object": (object, "object"),
    "str": (str, "str"),
    "unicode": (str, "str"),
    "complex": (complex, "complex"),
    "Inf": (math.inf, "numpy.inf"),
    "Infinity": (math.inf, "numpy.inf"),
    "infty": (math.inf, "numpy.inf"),
    "NaN": (math.nan, "numpy.nan"),
    "NAN": (math.nan, "numpy.nan"),
}
NUMPY_RENAMED = {
    "float_": "float64",
    "complex_": "complex128",
    "string_": "bytes_",
    "unicode_": "str_",
    "int0": "intp",
    "product": "prod",
    "cumproduct": "cumprod",
    "sometrue": "any",
    "alltrue": "all",
}


def patch() -> None:
    """Restore removed names of modules; existing names stay as they are."""
    _add(fractions, {"gcd": (math.gcd, "math.gcd")})
    _add(time, {"clock": (time.perf_counter, "time.perf_counter")})
    _add(inspect, {"getargspec": (_getargspec, "inspect.getfullargspec")})
    _add(collections, {name: (getattr(collections.abc, name), f"collections.abc.{name}") for name in ABSTRACT})
    numpy = importlib.import_module("numpy")
    renamed = {old: (getattr(numpy, new), f"numpy.{new}") for old, new in NUMPY_RENAMED.items()}
    _add(numpy, {**NUMPY, **renamed})
    sys.meta_path.insert(0, _Finder())


def _getargspec(function: Any) -> tuple[Any, ...]:
    full = inspect.getfullargspec(function)
    return full.args, full.varargs, full.varkw, full.defaults


def _add(module: ModuleType, names: dict[str, tuple[Any, str]]) -> None:
    """Resolve removed names by the module's `__getattr__`, so that nothing is printed before one is used."""
    before: Callable[[str], Any] | None = module.__dict__.get("__getattr__")

    def lookup(name: str) -> Any:
        if name in names:
            value, replacement = names[name]
            note(f"{module.__name__}.{name} was removed; {replacement} replaces it")
            return value
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__dict__["__getattr__"] = lookup


class _Finder(MetaPathFinder):
    """Provides `torch._six`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torch._six":
            note("torch._six was removed; a module with its names replaces it")
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
