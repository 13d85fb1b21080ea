"""Read the values of an arm's options from text. Each function raises `ValueError` with what it expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

from ampcompare.backends.explanation import BytesPerParameter
from ampcompare.backends.spec import Options

__all__ = [
    "DTYPE_NAMES",
    "INNER_ARM",
    "above_one",
    "below_one",
    "choice",
    "count",
    "flag",
    "float_dtype",
    "fp32_or_none",
    "full_dtype",
    "half_dtype",
    "loss_scale",
    "module_patterns",
    "positive",
    "type_rows",
    "with_state",
]

DTYPES = {
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
FULL = ("float32", "fp32", "float")
WHOLE = re.compile("[0-9]{1,99}")
PATTERN = re.compile(r"[\w.*?\[\]!-]+")
DTYPE_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def choice(*allowed: str) -> Callable[[str], str]:
    """Return a reader that accepts only the words in `allowed`, which are in lower case, in any case."""

    def read(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return text.lower()

    return read


def half_dtype(text: str) -> str:
    """Return "float16" or "bfloat16"."""
    if text.lower() not in DTYPES:
        raise ValueError("expected float16 (fp16) or bfloat16 (bf16)")
    return DTYPES[text.lower()]


def float_dtype(text: str) -> str:
    """Return "float32", "float16" or "bfloat16"."""
    if text.lower() not in {*FULL, *DTYPES}:
        raise ValueError("expected float32 (fp32), float16 (fp16) or bfloat16 (bf16)")
    return "float32" if text.lower() in FULL else half_dtype(text)


def fp32_or_none(text: str) -> str:
    """Return "float32" or "none"."""
    if text.lower() == "none":
        return "none"
    if text.lower() not in FULL:
        raise ValueError("expected fp32 or none")
    return "float32"


def full_dtype(text: str) -> str:
    """Return "float32"."""
    if text.lower() not in FULL:
        raise ValueError("expected fp32")
    return "float32"


def flag(text: str) -> bool:
    """Return a Boolean; yes, on and 1 count as true."""
    lowered = text.lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ValueError("expected true or false")


def positive(text: str) -> float:
    """Return a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise ValueError("expected a finite number above 0")
    return number


def above_one(text: str) -> float:
    """Return a finite number above 1."""
    if (number := positive(text)) <= 1:
        raise ValueError("expected a number above 1")
    return number


def below_one(text: str) -> float:
    """Return a number between 0 and 1."""
    if (number := positive(text)) >= 1:
        raise ValueError("expected a number between 0 and 1")
    return number


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not WHOLE.fullmatch(text) or (number := int(text)) < 1:
        raise ValueError("expected a whole number of at least 1")
    return number


def loss_scale(text: str) -> float | str:
    """Return "dynamic" or a finite number above 0."""
    if text.lower() == "dynamic":
        return "dynamic"
    try:
        return positive(text)
    except ValueError:
        raise ValueError("expected dynamic or a finite number above 0") from None


def module_patterns(text: str) -> str:
    """Return patterns of module names or types, joined by `|`, each once and in order."""
    patterns = sorted({word.strip() for word in text.split("|")})
    if not all(PATTERN.fullmatch(pattern) for pattern in patterns):
        raise ValueError("expected names or types of modules with *, ? and [], joined by |, such as *.norm|lm_head")
    return "|".join(patterns)


def INNER_ARM(text: str) -> str:
    """Mark an option whose value is an arm with its options joined by `+`; `Arm` reads it instead of this function."""
    return text


def type_rows(options: Options) -> tuple[tuple[str, str], ...]:
    """Return what an explanation says of `state`, `grads` and `reduce`; nothing of those that are not given."""
    rows = []
    if "grads" in options:
        rows.append(
            (
                "gradients",
                "gradients of a step's micro-batches are accumulated in fp32, in the gradients of the masters",
            )
        )
    if "reduce" in options:
        name = DTYPE_NAMES[str(options["reduce"])]
        rows.append(("reduction", f"gradients are averaged over ranks in {name}; with one process there is none"))
    if "state" in options:
        name = DTYPE_NAMES[str(options["state"])]
        small = "; second moments below 2**-25 become 0 there" if name == "fp16" else ""
        rows.append(("optimizer state", f"held in {name} between steps, and widened to fp32 for a step{small}"))
    return tuple(rows)


def with_state(held: BytesPerParameter, options: Options) -> BytesPerParameter:
    """Return `held` with the bytes of optimizer state that an arm chooses."""
    return replace(held, state=_BYTES[str(options["state"])]) if "state" in options else held
