"""The parts of `apex.contrib` that scripts import; what is absent is listed in `docs/apex-surface.md`."""

import importlib
from typing import Any

__all__ = ["clip_grad", "layer_norm", "multihead_attn", "optimizers", "xentropy"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
