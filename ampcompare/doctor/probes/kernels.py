"""Whether Apex's compiled kernels load."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["kernels"]


def kernels() -> dict[str, Any]:
    """Import `amp_C`; if it needs torch's libraries, import torch first, as every script does."""
    try:
        module = importlib.import_module("amp_C")
    except ImportError as error:
        if not any(name in str(error) for name in ("libc10", "libtorch")):
            raise
        importlib.import_module("torch")
        module = importlib.import_module("amp_C")
    return {"file": getattr(module, "__file__", None)}
