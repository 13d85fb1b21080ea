"""The precisions that trained weights can be evaluated in: `fp32,bf16,fp16,float64,autocast:bf16`."""

from __future__ import annotations

from collections.abc import Iterable

from ampcompare.base.errors import ConfigError

__all__ = ["AUTOCAST", "EVAL_PRECISIONS", "parse_eval_precisions"]

AUTOCAST = "autocast:"
EVAL_PRECISIONS = ("fp32", "bf16", "fp16", "float64", "autocast:bf16", "autocast:fp16")
SYNONYMS = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp64": "float64", "double": "float64",
}  # fmt: skip


def parse_eval_precisions(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return precisions in their canonical names, each once, in the order given.

    Args:
        given: names, or one text with names joined by commas.

    Raises:
        ConfigError: there is no such precision.
    """
    names = given.split(",") if isinstance(given, str) else given
    return tuple(dict.fromkeys(_canonical(name.strip()) for name in names if name.strip()))


def _canonical(name: str) -> str:
    prefix = AUTOCAST if name.startswith(AUTOCAST) else ""
    bare = name.removeprefix(prefix)
    known = f"{prefix}{SYNONYMS.get(bare, bare)}"
    if known not in EVAL_PRECISIONS:
        raise ConfigError(f"there is no precision {name!r} to evaluate in; choose from {', '.join(EVAL_PRECISIONS)}")
    return known
