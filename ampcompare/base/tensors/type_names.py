"""Types of numbers by the names that arms, ledgers and tables have for them. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection

NARROW_FIRST = ("fp8", "fp16", "bf16", "fp32", "fp64")
HALF_NAMES = ("fp16", "bf16")  # of 16 bits
NAME_BY_TORCH_NAME = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def narrowest_of_type_names(names: Collection[str]) -> str:
    """Return the narrowest of some types; "" if `NARROW_FIRST` has none of them."""
    return next((name for name in NARROW_FIRST if name in names), "")
