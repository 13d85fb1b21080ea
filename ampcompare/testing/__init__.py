"""For test suites of other projects: assertions that a module, a loss or a step holds under given arms, and records
without a training.

The names are imported when they are first used: pytest loads the plugin next to this file in each of its runs.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in ampcompare/__init__.py
if TYPE_CHECKING:
    from typing import Any

    from ampcompare.diagnosis.holds import DoesNotHold, Figure, Held, holds
    from ampcompare.testing.made_runs import make_comparison, make_record

__all__ = ["DoesNotHold", "Figure", "Held", "holds", "make_comparison", "make_record"]


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use.

    Raises:
        AttributeError: `name` is not public.
    """
    if name not in __all__:
        raise AttributeError(f"module 'ampcompare.testing' has no attribute {name!r}")
    home = "ampcompare.testing.made_runs" if name.startswith("make_") else "ampcompare.diagnosis.holds"
    if home == "ampcompare.diagnosis.holds":
        from ampcompare.base.environment.extras import require_torch

        require_torch()
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
