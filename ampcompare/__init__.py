"""Compare NVIDIA Apex AMP with native torch.amp, manual half precision and fp32.

The public names below are imported when first used: `import ampcompare` itself loads neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ampcompare.version import __version__

if TYPE_CHECKING:
    from ampcompare.arm import Arm
    from ampcompare.compare.api import compare, run
    from ampcompare.config import Recipe, RunConfig
    from ampcompare.precision.base import Precision, StepOutcome
    from ampcompare.precision.factory import make_precision
    from ampcompare.record import RunRecord, StepRecord

__all__ = [
    "Arm",
    "Precision",
    "Recipe",
    "RunConfig",
    "RunRecord",
    "StepOutcome",
    "StepRecord",
    "__version__",
    "compare",
    "make_precision",
    "run",
]

_HOMES = {
    "Arm": "ampcompare.arm",
    "Precision": "ampcompare.precision.base",
    "Recipe": "ampcompare.config",
    "RunConfig": "ampcompare.config",
    "RunRecord": "ampcompare.record",
    "StepOutcome": "ampcompare.precision.base",
    "StepRecord": "ampcompare.record",
    "make_precision": "ampcompare.precision.factory",
    "run": "ampcompare.compare.api",
}


class _CallableRoom(ModuleType):
    """The package `ampcompare.compare`, which can be called like the function of the same name inside it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `ampcompare.compare.api.compare`."""
        return importlib.import_module("ampcompare.compare.api").compare(*args, **kwargs)


class _Package(ModuleType):
    """This package. Importing any part of the room `compare` binds the room here, over a function of that name;
    so the room itself is made callable as it arrives, and `ampcompare.compare(...)` works in either order."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Bind `name`, as the import system does for each submodule."""
        if name == "compare":
            value.__class__ = _CallableRoom
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use.

    Raises:
        AttributeError: `name` is not public.
    """
    if name == "compare":
        return importlib.import_module("ampcompare.compare")
    if name not in _HOMES:
        raise AttributeError(f"module 'ampcompare' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, also those not imported yet."""
    return sorted({*globals(), *__all__})
