"""Whether `apex.amp` imports and has what scripts call."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["apex_amp"]

SURFACE = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")


def apex_amp() -> dict[str, Any]:
    """Import `apex.amp` and return the names that it lacks."""
    amp = importlib.import_module("apex.amp")
    return {"lacks": [name for name in SURFACE if not hasattr(amp, name)]}
