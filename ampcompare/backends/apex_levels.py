"""The options of each opt level, and those of an arm that overrides some.

Source: Apex 25.05, `apex/amp/frontend.py`; for O4 and O5 that of ROCm's Apex. A test holds the table against our
engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FIRST_SCALE", "GROWTH_INTERVAL", "LEVELS", "MAX_SCALE", "ROCM_LEVELS", "Level", "apex_level"]

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
MAX_SCALE = 2.0**24


@dataclass(frozen=True)
class Level:
    """The options that `amp.initialize` sets; None where the level leaves an option open.

    Attributes:
        cast_model_type: "float32", "float16", "bfloat16" or None.
        loss_scale: a number or "dynamic".
        half_dtype: the 16-bit type of the level.
    """

    cast_model_type: str | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str
    cast_model_outputs: str | None = None
    min_loss_scale: float | None = None
    max_loss_scale: float = MAX_SCALE
    half_dtype: str = "float16"

    @property
    def is_half(self) -> bool:
        """Whether the model's weights become 16-bit."""
        return self.cast_model_type in ("float16", "bfloat16")

    @property
    def half_name(self) -> str:
        """The 16-bit type of the level, "fp16" or "bf16"."""
        return "bf16" if self.half_dtype == "bfloat16" else "fp16"


LEVELS: dict[str, Level] = {
    "O0": Level("float32", False, None, False, 1.0),
    "O1": Level(None, True, None, None, "dynamic"),
    "O2": Level("float16", False, True, True, "dynamic"),
    "O3": Level("float16", False, False, False, 1.0),
    "O4": Level(None, True, None, None, 1.0, half_dtype="bfloat16"),
    "O5": Level("bfloat16", False, True, True, 1.0, half_dtype="bfloat16"),
}

ROCM_LEVELS = ("O4", "O5")  # which NVIDIA's Apex never had


def apex_level(options: Mapping[str, Any]) -> Level:
    """Return the options of an `apex` arm: those of its level, and what the arm overrides."""
    settled = dict(LEVELS[options.get("opt_level", "O1")].__dict__)
    settled.update({name: value for name, value in options.items() if name in settled})
    return Level(**settled)
