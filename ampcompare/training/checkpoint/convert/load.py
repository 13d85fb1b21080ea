"""Bring a checkpoint of any program into memory as tensors and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampcompare.base.errors import CheckpointError
from ampcompare.training.checkpoint.convert.detect import find_parts
from ampcompare.training.checkpoint.convert.fp32_weights import (
    Conversion,
    at_place,
    copy_containers,
    strip_prefix,
    unflatten,
    unfuse,
    without_prefix,
)
from ampcompare.training.checkpoint.convert.scalers import apex_state_of, held_scale, raw_scale
from ampcompare.training.checkpoint.reader.foreign import name_faults, open_foreign
from ampcompare.training.checkpoint.store.file import read_checkpoint
from ampcompare.training.checkpoint.store.layout import CONVERTED, one_or_list

__all__ = ["as_ours", "load_any", "load_ours"]


def load_any(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read a checkpoint of any program into tensors and plain values; whole models become state dicts.

    Returns:
        What it holds, and place and class of each object that is left out.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    contents = open_foreign(path)
    if contents.comment.startswith(b"ampcompare checkpoint"):
        return read_checkpoint(path), []
    with name_faults(path):
        state, left_out = contents.plain()
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a checkpoint")
    return state, left_out


def as_ours(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights, optimizers and loss scalers of a checkpoint of any program under ampcompare's keys.

    Names lose the `module.` of a DDP wrapper, and the state of FusedAdam becomes one of AdamW.

    Raises:
        CheckpointError: it lacks weights or optimizers.
    """
    parts = find_parts(root)
    if not parts.models or not parts.optimizers:
        raise CheckpointError("training cannot resume from a checkpoint without weights and optimizer state")
    held = Conversion(copy_containers(root), "", None)
    strip_prefix(parts, held)
    for place in parts.optimizers:
        optimizer = at_place(held.state, place)
        unflatten(optimizer, ".".join(place), parts, held)
        unfuse(optimizer, ".".join(place), held)
    state: dict[str, Any] = {
        CONVERTED: True,
        "model": one_or_list([at_place(held.state, place) for place in parts.models]),
        "optimizer": one_or_list([at_place(held.state, place) for place in parts.optimizers]),
        "masters": one_or_list([without_prefix(masters) for masters in parts.masters]) if parts.masters else {},
    }
    scalers = [entry for entry in parts.wrappers.values() if raw_scale(entry) is not None]
    if scalers or parts.loss_scales:
        scales = [held_scale(entry) for entry in (*scalers, *parts.loss_scales.values())]
        state["amp"] = apex_state_of(scales, level="O2", lost=[], changed=[])
    for key, found in (("amp", parts.apex), ("scaler", parts.scalers)):
        if found:
            state[key] = next(iter(found.values()))
    return state


def load_ours(path: Path) -> dict[str, Any]:
    """Read a checkpoint of any program under ampcompare's keys.

    Raises:
        CheckpointError: as for `load_any` and `as_ours`.
    """
    root, _ = load_any(path)
    with name_faults(path):
        return as_ours(root)
