"""Loss scalers between Apex and torch.amp, and a line for all that one of them cannot hold.

Source: `amp.state_dict` of Apex 25.05, `FP16_Optimizer.state_dict` with the scalers of `apex.amp` and, in older files,
of `apex.fp16_utils`, and `torch.amp.GradScaler.state_dict` of torch 2.4 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.base.errors import ConversionError

__all__ = [
    "APEX_INTERVAL",
    "FIRST_SCALE",
    "NEVER",
    "STATIC_LEVELS",
    "HeldScale",
    "apex_from_scalers",
    "apex_state_of",
    "grad_scalers_of",
    "held_scale",
    "lost_flags",
    "parse_count",
    "parse_scale",
    "parse_step_count",
    "scalers_from_apex",
]

MAX_SCALE = float(2**128 - 2**104)
"""The largest fp32 number: every scaler multiplies in fp32."""
MAX_STEPS = 2**53
FIRST_SCALE = 65536.0
APEX_FACTOR, APEX_BACKOFF, APEX_INTERVAL, APEX_MAX = 2.0, 0.5, 2000, 2.0**24
NEVER = 2**31 - 1
STATIC_LEVELS = ("O0", "O3", "O4", "O5")


def parse_scale(value: Any, where: str) -> float:
    """Return a loss scale: a positive finite fp32 number.

    Args:
        where: what it is, for the message.

    Raises:
        ConversionError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SCALE:
        raise ConversionError(
            f"{where} is {_shown(value)}, not a usable loss scale; convert a checkpoint from before that"
        )
    return float(value)


def parse_count(value: Any, where: str) -> int:
    """Return a number of steps, truncated to an integer.

    Args:
        where: what it counts, for the message.

    Raises:
        ConversionError: it is negative, not finite, or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf or value > MAX_STEPS:
        raise ConversionError(f"{where} is {_shown(value)}, not a valid step count")
    return int(value)


def parse_step_count(value: Any, where: str) -> int:
    """Return a number of steps that is stored as an integer.

    Args:
        where: what it counts, for the message.

    Raises:
        ConversionError: it is negative, too large for any run, or not an integer.
    """
    if type(value) is not int:
        raise ConversionError(f"{where} is {_shown(value)}, not a valid step count")
    return parse_count(value, where)


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"


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


def scalers_from_apex(
    state: Mapping[str, Any], *, level: str | None, static: float | None, lost: list[str], changed: list[str]
) -> list[dict[str, Any]]:
    """Return one `GradScaler` state for each Apex scaler, in order.

    Args:
        level: opt level that the state was saved at, if known.
        static: its static scale, if it is known to have one.
        lost, changed: get a line for each value that is lost, and for each that is written in another form.

    Raises:
        ConversionError: a scale is not a positive finite number.
    """
    made: list[dict[str, Any]] = []
    for name, entry in state.items():
        scale = parse_scale(entry["loss_scale"], f"the scale of {name}")
        clean = parse_count(entry["unskipped"], f"unskipped of {name}")
        is_static = static is not None or clean >= APEX_INTERVAL or (level in STATIC_LEVELS and scale == 1.0)
        if is_static and scale == 1.0 and level != "O3":
            made.append({})
            changed.append(f"{name}: static scale 1 becomes a disabled GradScaler")
            continue
        if is_static and scale == 1.0:
            is_static, scale, clean = False, FIRST_SCALE, 0
            changed.append(f"{name}: O3 scaled nothing, so the GradScaler begins as a new one")
        if is_static:
            changed.append(
                f"{name}: static scale {scale:g} becomes a GradScaler that never grows; it still halves at an "
                "overflow, where Apex kept it"
            )
        elif clean or scale != FIRST_SCALE:
            changed.append(f"{name}: scale {scale:g} and {clean} clean steps, as scale and _growth_tracker")
        interval = None if is_static else APEX_INTERVAL
        made.append(_grad_scaler(HeldScale(scale, not is_static, clean, interval, APEX_FACTOR, None, None)))
    if len(made) > 1:
        lost.append(
            f"{len(made)} loss scalers moved apart in Apex; each becomes a GradScaler of its own, in a list, and a "
            "script has to use them so"
        )
    return made


def apex_from_scalers(
    scalers: Sequence[Mapping[str, Any]], *, level: str, lost: list[str], changed: list[str]
) -> dict[str, dict[str, Any]]:
    """Return an `amp.state_dict()` with one entry for each `GradScaler`.

    Args:
        level: opt level that will load it.
        lost, changed: as for `scalers_from_apex`.

    Raises:
        ConversionError: a scale is not a positive finite number.
    """
    made: dict[str, dict[str, Any]] = {}
    for index, state in enumerate(scalers or [{}]):
        name = f"loss_scaler{index}"
        if not state:
            scale = 1.0 if level in STATIC_LEVELS else FIRST_SCALE
            made[name] = {"loss_scale": scale, "unskipped": 0}
            changed.append(f"{name}: there was no GradScaler, so it begins at {scale:g}, as {level} does")
            continue
        scale = parse_scale(state["scale"], "the scale of the GradScaler")
        clean = parse_count(state["_growth_tracker"], "_growth_tracker")
        if level in STATIC_LEVELS:
            made[name] = {"loss_scale": 1.0, "unskipped": 0}
            lost.append(f"scale {scale:g}: {level} has a static scale of 1, and with another no overflow is noticed")
            continue
        changed.append(f"{name}: scale {scale:g} and _growth_tracker {clean}, as loss_scale and unskipped")
        for key, apex_value in (("growth_factor", APEX_FACTOR), ("backoff_factor", APEX_BACKOFF)):
            factor = parse_scale(state[key], key)
            if factor != apex_value:
                lost.append(f"{key} {factor:g}: Apex always has {apex_value:g}")
        interval = parse_count(state["growth_interval"], "growth_interval")
        if interval != APEX_INTERVAL:
            lost.append(f"growth_interval {interval}: Apex always has {APEX_INTERVAL}")
        if clean >= APEX_INTERVAL:
            lost.append(f"_growth_tracker {clean}: Apex never grows from there, so unskipped is {APEX_INTERVAL - 1}")
            clean = APEX_INTERVAL - 1
        if scale > APEX_MAX:
            lost.append(f"scale {scale:g} is above Apex's ceiling of 2**24: its next growth moves it down there")
        made[name] = {"loss_scale": scale, "unskipped": clean}
    return made


def grad_scalers_of(scales: Sequence[HeldScale], *, lost: list[str], changed: list[str]) -> list[dict[str, Any]]:
    """Return one `GradScaler` state for the loss scaler of each `FP16_Optimizer`.

    Args:
        lost, changed: as for `scalers_from_apex`.
    """
    made: list[dict[str, Any]] = []
    for held in scales:
        if not held.dynamic and held.scale == 1.0:
            made.append({})
            changed.append("static scale 1 becomes a disabled GradScaler")
            continue
        if held.dynamic:
            changed.append(f"scale {held.scale:g} and {held.clean} clean steps, as scale and _growth_tracker")
            bounds = (("min_loss_scale", held.least), ("max_loss_scale", held.most))
            lost += [f"{name} {bound:g}: GradScaler has none" for name, bound in bounds if bound is not None]
        else:
            changed.append(
                f"static scale {held.scale:g} becomes a GradScaler that never grows; it still halves at an overflow, "
                "where FP16_Optimizer kept it"
            )
        made.append(_grad_scaler(held))
    if len(made) > 1:
        lost.append(f"{len(made)} loss scalers: a list of GradScalers, and a script has to use one for each optimizer")
    return made


def _grad_scaler(held: HeldScale) -> dict[str, Any]:
    return {
        "scale": held.scale,
        "growth_factor": held.factor if held.dynamic else APEX_FACTOR,
        "backoff_factor": 1.0 / held.factor if held.dynamic else APEX_BACKOFF,
        "growth_interval": NEVER if held.interval is None else held.interval,
        "_growth_tracker": held.clean if held.dynamic else 0,
    }


def apex_state_of(
    scales: Sequence[HeldScale], *, level: str, lost: list[str], changed: list[str]
) -> dict[str, dict[str, Any]]:
    """Return an `amp.state_dict()` with one entry for the loss scaler of each `FP16_Optimizer`.

    Args:
        level: opt level that will load it.
        lost, changed: as for `scalers_from_apex`.
    """
    made: dict[str, dict[str, Any]] = {}
    for index, held in enumerate(scales):
        name = f"loss_scaler{index}"
        if not held.dynamic:
            made[name] = {"loss_scale": held.scale, "unskipped": held.clean}
            changed.append(
                f"{name}: static scale {held.scale:g}; give loss_scale={held.scale:g} to amp.initialize too, as no "
                "state says that a scale is static"
            )
            continue
        (made[name],) = apex_from_scalers([_grad_scaler(held)], level=level, lost=lost, changed=changed).values()
        if held.least is not None:
            lost.append(f"min_loss_scale {held.least:g}: no state of amp has it; give it to amp.initialize")
        if held.most != APEX_MAX:
            maximum = "none" if held.most is None else f"{held.most:g}"
            lost.append(f"max_loss_scale {maximum}: no state of amp has it; give it to amp.initialize")
    if len(made) > 1:
        lost.append(f"{len(made)} loss scalers: give num_losses={len(made)}, and each loss its loss_id")
    return made
