"""Separately chosen dtypes: of optimizer state, of accumulated gradients, and of their reduction."""

from __future__ import annotations

from dataclasses import replace

from ampcompare.backends.explanation import BytesPerParameter
from ampcompare.backends.options import DTYPE_NAMES
from ampcompare.backends.spec import Options

__all__ = ["BYTES", "type_rows", "with_state"]

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


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
    return replace(held, state=BYTES[str(options["state"])]) if "state" in options else held
