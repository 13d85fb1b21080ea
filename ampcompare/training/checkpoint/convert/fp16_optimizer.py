"""Checkpoints of scripts with `apex.fp16_utils.FP16_Optimizer`: its masters by name, and its loss scaler as values.

Source: `FP16_Optimizer.state_dict` of Apex 25.05, and the loss scalers of `apex.amp` and, in older files, of
`apex.fp16_utils`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ampcompare.base.errors import ConversionError
from ampcompare.training.checkpoint.convert.scaler_numbers import parse_count, parse_scale

__all__ = ["KEYS", "HeldScale", "held_scale", "is_fp16_optimizer", "lost_flags", "match_masters"]

KEYS = ("loss_scaler", "optimizer_state_dict", "fp32_from_fp16")
MASTERS = "fp32_from_fp16"


@dataclass(frozen=True)
class HeldScale:
    """The values of a loss scaler.

    Attributes:
        dynamic: whether it moves.
        clean: steps since the scale last changed.
        interval: clean steps in a row after which it grows; None if it does not.
        factor: it grows by this, and falls by its inverse.
        least, most: bounds of the scale; None if unbounded.
    """

    scale: float
    dynamic: bool
    clean: int
    interval: int | None
    factor: float
    least: float | None
    most: float | None


def is_fp16_optimizer(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is what `FP16_Optimizer.state_dict()` returns."""
    return (
        isinstance(value, Mapping)
        and all(key in value for key in KEYS)
        and isinstance(inner := value["optimizer_state_dict"], Mapping)
        and isinstance(inner.get("param_groups"), list)
        and isinstance(value[MASTERS], list)
    )


def held_scale(state: Mapping[str, Any]) -> HeldScale:
    """Return the loss scaler of an `FP16_Optimizer`, of any class of Apex or ampcompare.

    Args:
        state: of the optimizer, with the attributes of the scaler as a dict.

    Raises:
        ConversionError: it is not a known loss scaler, or its values are not usable.
    """
    scaler = state["loss_scaler"]
    if not isinstance(scaler, Mapping):
        raise ConversionError(
            "the loss scaler of FP16_Optimizer is an object of a class that is not known; load it where it is "
            "installed, and save {'_loss_scale': ..., 'dynamic': ..., '_unskipped': ...} under loss_scaler"
        )
    if "cur_scale" in scaler:
        return _of_fp16_utils(scaler)
    # Apex's attribute; ampcompare's has it behind a property of that name
    scale = parse_scale(scaler.get("_loss_scale", scaler.get("_host_scale")), "the loss scale of FP16_Optimizer")
    clean = parse_count(scaler.get("_unskipped", scaler.get("_host_unskipped", 0)), "unskipped of FP16_Optimizer")
    dynamic = bool(scaler.get("dynamic", state.get("dynamic_loss_scale", False)))
    if not dynamic:
        return HeldScale(scale, False, clean, None, 1.0, None, None)
    interval = max(1, parse_count(scaler.get("_scale_seq_len", 2000), "the scale window of FP16_Optimizer"))
    min_scale, max_scale = scaler.get("_min_loss_scale"), scaler.get("_max_loss_scale")
    return HeldScale(
        scale,
        True,
        clean,
        interval,
        2.0,
        parse_scale(min_scale, "min_loss_scale of FP16_Optimizer") if min_scale else None,
        None if max_scale is None else parse_scale(max_scale, "max_loss_scale of FP16_Optimizer"),
    )


def _of_fp16_utils(scaler: Mapping[str, Any]) -> HeldScale:
    """Return the values of `fp16_utils.LossScaler` or `DynamicLossScaler`, which counts all iterations."""
    scale = parse_scale(scaler["cur_scale"], "the loss scale of FP16_Optimizer")
    if "scale_window" not in scaler:
        return HeldScale(scale, False, 0, None, 1.0, None, None)
    window = max(1, parse_count(scaler["scale_window"], "scale_window of FP16_Optimizer"))
    last = scaler.get("last_overflow_iter", -1)
    since = parse_count(scaler.get("cur_iter", 0), "cur_iter") - (last if isinstance(last, int) else -1) - 1
    factor = parse_scale(scaler.get("scale_factor", 2.0), "scale_factor of FP16_Optimizer")
    return HeldScale(scale, True, max(0, since) % window, window, factor, 1.0, None)


def lost_flags(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each flag of an `FP16_Optimizer` that says what it was in the middle of."""
    if state.get("overflow"):
        yield "overflow=True: saved between backward and step, that step is no longer skipped; saved after it, nothing"
    if state.get("first_closure_call_this_step") is False:
        yield "first_closure_call_this_step=False: it was saved inside a closure, which cannot be resumed"


def match_masters(
    models: list[Mapping[str, Any]], states: list[Mapping[str, Any]]
) -> tuple[list[dict[str, Tensor]], int]:
    """Give the masters their names: those of the fp16 weights that have their values, in the order of both.

    Returns:
        Masters by name, for each model, and the number of masters that match no weight.
    """
    found: list[dict[str, Tensor]] = [{} for _ in models]
    weights = [
        (index, name, value)
        for index, model in enumerate(models)
        for name, value in model.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    unmatched = begin = 0
    for master in _masters(states):
        # of weights that are alike, such as biases of zeros, the next one; groups may have another order
        order = [*range(begin, len(weights)), *range(begin)]
        place = next((at for at in order if _is_master(master, weights[at][2])), None)
        if place is None:
            unmatched += 1
            continue
        index, name, _ = weights.pop(place)
        found[index][name] = master.detach()
        begin = place
    return found, unmatched


def _masters(states: list[Mapping[str, Any]]) -> Iterator[Tensor]:
    for state in states:
        for group in state[MASTERS]:
            for master in group if isinstance(group, list) else ():
                if isinstance(master, Tensor) and master.is_floating_point():
                    yield master


def _is_master(master: Tensor, weight: Tensor) -> bool:
    """Return whether a weight is the master as fp16; a script may have made it fp32 again."""
    return master.shape == weight.shape and torch.equal(master.half().float(), weight.float())
