"""Assertions for the test suites of other projects: a module, a loss or a training step holds under given arms.

The names are imported when they are first used: pytest loads the plugin next to this file in each of its runs.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in ampcompare/__init__.py
if TYPE_CHECKING:
    from typing import Any

    from ampcompare.diagnosis.holds import DoesNotHold, Figure, Held, holds

__all__ = ["DoesNotHold", "Figure", "Held", "holds"]


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use.

    Raises:
        AttributeError: `name` is not public.
    """
    if name not in __all__:
        raise AttributeError(f"module 'ampcompare.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module("ampcompare.diagnosis.holds"), name)
    globals()[name] = value
    return value
