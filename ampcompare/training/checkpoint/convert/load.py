"""Bring a checkpoint of any program into memory as tensors and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.base.errors import CheckpointError
from ampcompare.base.formatting import printable
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
from ampcompare.training.checkpoint.reader.placeholders import holds_only_data
from ampcompare.training.checkpoint.store.layout import CONVERTED, one_or_list
from ampcompare.training.checkpoint.store.sharded import is_sharded_folder, read_saved

__all__ = ["as_ours", "load_any", "load_ours", "objects_of"]

MAX_NAME = 80


def load_any(path: Path, *, trust: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Read a checkpoint of any program into tensors and plain values.

    Args:
        trust: let torch unpickle objects of other programs, which runs their code; whole models become state dicts.
            Where that fails, the objects are left out.

    Returns:
        What it holds, and the places of objects that are left out.

    Raises:
        CheckpointError: it cannot be read, or holds objects and is not trusted; the message lists them.
    """
    if is_sharded_folder(path):
        return read_saved(path), []
    contents = open_foreign(path)
    if contents.comment.startswith(b"ampcompare checkpoint"):
        return read_saved(path), []
    with name_faults(path):
        state, left_out = contents.plain()
    if contents.needs_trust and not trust:
        shown = ", ".join(printable(name, MAX_NAME, keep_end=49) for name in left_out[:10] or contents.calls[:10])
        more = f" and {len(left_out) - 10} more" if len(left_out) > 10 else ""
        raise CheckpointError(
            f"{path} holds objects, and loading them runs code from the file: {shown}{more}; "
            "if you trust its author, add --unsafe-load"
        )
    if contents.needs_trust:
        try:
            state, left_out = _unpickle(path)
        except Exception as error:  # whatever the objects' own code raises; often it is not installed here
            text = " ".join(str(error).split())[:120]
            left_out.insert(0, f"all objects, which cannot be made here ({type(error).__name__}: {text})")
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


def load_ours(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Read a checkpoint of any program under ampcompare's keys.

    Raises:
        CheckpointError: as for `load_any` and `as_ours`.
    """
    root, _ = load_any(path, trust=trust)
    with name_faults(path):
        return as_ours(root)


def objects_of(path: Path) -> list[str]:
    """Return the places of objects of other programs in a file, as they may be shown.

    Raises:
        CheckpointError: it cannot be read.
    """
    return [printable(place, MAX_NAME, keep_end=49) for place in open_foreign(path).plain()[1]]


def _unpickle(path: Path) -> tuple[Any, list[str]]:
    loaded = torch.load(path, map_location="cpu", weights_only=False)
    left_out: list[str] = []
    return _without_objects(loaded, "", left_out, {}), left_out


def _without_objects(value: Any, place: str, left_out: list[str], seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return seen[id(value)]
    made: Any
    if isinstance(value, nn.Module):
        made = dict(value.state_dict())
    elif isinstance(value, Tensor):
        made = value.detach()
    elif isinstance(value, Mapping):
        made = {}
        seen[id(value)] = made
        for key, item in value.items():
            plain = key if isinstance(key, str | int | float | bool | bytes | None) else str(key)
            made[plain] = _without_objects(item, f"{place}.{key}" if place else str(key), left_out, seen)
        return made
    elif isinstance(value, list | tuple | set | frozenset):
        made = [_without_objects(item, f"{place}.{index}", left_out, seen) for index, item in enumerate(value)]
        made = tuple(made) if isinstance(value, tuple) else made
    elif type(value) in (str, int, float, bool, bytes, type(None), torch.dtype, torch.Size):
        made = value
    elif holds_only_data(f"{type(value).__module__}.{type(value).__qualname__}") and hasattr(value, "__dict__"):
        made = _without_objects(vars(value), place, left_out, seen)
    else:
        left_out.append(f"{place or 'the whole file'}: {type(value).__module__}.{type(value).__qualname__}")
        made = None
    seen[id(value)] = made
    return made
