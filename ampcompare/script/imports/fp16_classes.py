"""Both classes `FP16_Optimizer` of Apex, where the Apex that a script imports has them."""

import importlib
from contextlib import suppress
from typing import Any

MODULES = ("apex.fp16_utils", "apex.contrib.optimizers.fp16_optimizer")


def fp16_optimizer_classes() -> list[Any]:
    """Return both classes, that of `apex.fp16_utils` first; of a build of the real Apex maybe that one alone."""
    classes = []
    for name in MODULES:
        with suppress(ImportError):
            classes.append(importlib.import_module(name).FP16_Optimizer)
    return classes
