"""Whether torchvision imports, as it is or with the operators that its import misses next to a CPU build of torch."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["vision"]


def vision() -> dict[str, Any]:
    """Import torchvision; if its operators are missing, import it again in the way that ampcompare does."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        plain = " ".join(str(error).split())
        importlib.import_module("ampcompare.tasks.torchvision_loader").load_torchvision()
        return {"plain": plain}
    return {"plain": None}
