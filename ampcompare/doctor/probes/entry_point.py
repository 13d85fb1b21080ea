"""Whether the backend that another package registers can be imported."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["entry_point"]


def entry_point(value: str) -> dict[str, Any]:
    """Import `module:attribute`."""
    module, _, attribute = value.partition(":")
    getattr(importlib.import_module(module), attribute)
    return {"value": value}
