"""What happens on mistakes in the use of mixed precision, in words and as options of `exec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

GuardMode = Literal["warn", "strict", "off"]  # a line for each, an error at the first, or no guards
GUARD_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "warn": (),
    "strict": ("--strict-guards",),
    "off": ("--no-guards",),
}
