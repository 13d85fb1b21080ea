"""Loss scalers between Apex and torch.amp, and a line for all that one of them cannot hold.

Source: `amp.state_dict` of Apex 25.05, and `torch.amp.GradScaler.state_dict` of torch 2.4 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampcompare.training.checkpoint.convert.fp16_optimizer import HeldScale
from ampcompare.training.checkpoint.convert.scaler_numbers import parse_count, parse_scale

__all__ = [
    "APEX_INTERVAL",
    "FIRST_SCALE",
    "NEVER",
    "STATIC_LEVELS",
    "apex_from_scalers",
    "apex_state_of",
    "grad_scalers_of",
    "scalers_from_apex",
]

FIRST_SCALE = 65536.0
APEX_FACTOR, APEX_BACKOFF, APEX_INTERVAL, APEX_MAX = 2.0, 0.5, 2000, 2.0**24
NEVER = 2**31 - 1
STATIC_LEVELS = ("O0", "O3", "O4", "O5")


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
