"""Carry the state of a run from one arm to another."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConversionError
from ampcompare.checkpoints.convert.detect import contents_by_kind
from ampcompare.checkpoints.convert.fp32_weights import ConvertedCheckpoint, convert_to_fp32, copy_containers
from ampcompare.checkpoints.convert.scalers import (
    APEX_INTERVAL,
    FIRST_SCALE,
    NEVER,
    apex_state_from_grad_scalers,
    grad_scaler_states_from_apex,
    parse_scale,
)
from ampcompare.checkpoints.store.layout import (
    CONVERTED,
    PRECISION_KEYS,
    TRAINER,
    list_of_one_or_several,
    only_entry_or_list,
)

COMPENSATION = "compensation"  # in the state of each weight under `half:kahan`
NEW_SCALER = {
    "scale": FIRST_SCALE,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": APEX_INTERVAL,
    "_growth_tracker": 0,
}


def convert_state_to_arm(state: Mapping[str, Any], arm: str) -> ConvertedCheckpoint:
    """Convert an ampcompare checkpoint into one that another arm resumes from; the source is untouched.

    Weights become fp32, from masters if any, so that nothing is lost when the source is O2. A level with masters gets
    them from these weights. Loss scalers keep scale and count as far as the arm has such.

    Args:
        state: what the file of a run holds.
        arm: the one to resume with, as text.

    Raises:
        ConversionError: no run of ampcompare wrote the state.
    """
    parts = contents_by_kind(state)
    if parts.arm is None or not parts.models:
        raise ConversionError("it is not a checkpoint that a run of ampcompare wrote")
    text = str(Arm.parse(arm))
    was, target = _arm_that_holds_state(parts.arm), _arm_that_holds_state(arm)
    level, was_level = _opt_level_of_arm_state(target), _opt_level_of_arm_state(was)
    result = ConvertedCheckpoint(
        copy_containers(state), conversion_kind_of_arm(parts.arm), level or was_level, text
    )
    scalers = _scalers_as_grad_scalers(state, was, was_level, result)
    _drop_kahan_compensation(result.state, result)
    convert_to_fp32(parts, result, was_level)
    key, entry = _key_and_precision_state_for_arm(target, level, scalers, result)
    state_now = {name: value for name, value in result.state.items() if name not in PRECISION_KEYS}
    state_now[key] = entry
    masters = [
        {
            name: value
            for name, value in model.items()
            if isinstance(value, Tensor) and value.dtype is torch.float32
        }
        for model in list_of_one_or_several(state_now["model"])
        if has_masters(arm)
    ]
    if masters:
        result.changed.append("fp32 weights are carried as masters too")
    state_now[CONVERTED] = True
    state_now.setdefault(TRAINER, parts.arm)
    tally = (state_now.get("parts") or {}).get("tally")
    if not entry and isinstance(tally, dict):
        tally["final_loss_scale"] = None  # the containers of a conversion are copies
    state_now.update(arm=text, engine=None, masters=only_entry_or_list(masters) if masters else {})
    if "zeroed" in state_now:
        state_now["zeroed"] = []
    result.state = state_now
    return result


def _drop_kahan_compensation(state: dict[str, Any], result: ConvertedCheckpoint) -> None:
    """Remove what the rounding of weights has cut off, which only an arm with Kahan's compensation keeps."""
    entries = [
        entry
        for optimizer in list_of_one_or_several(state["optimizer"])
        for entry in optimizer["state"].values()
    ]
    dropped = [
        entry.pop(COMPENSATION) for entry in entries if isinstance(entry, dict) and COMPENSATION in entry
    ]
    if dropped:
        result.lost.append(
            f"the compensation of {len(dropped)} weights: their values are those of the 16-bit weights"
        )


def has_masters(arm: str) -> bool:
    """Return whether an arm keeps fp32 masters of its 16-bit weights."""
    target = _arm_that_holds_state(arm)
    return target.roles is not None and bool(target.roles.masters)


def _arm_that_holds_state(text: str) -> Arm:
    """Parse an arm; one that runs on another arm keeps the state of that arm."""
    arm = Arm.parse(text)
    return arm.inner or arm


def _opt_level_of_arm_state(arm: Arm) -> str | None:
    """Return the opt level whose `amp.state_dict` an arm keeps; None if it keeps none."""
    return arm.spec.checkpoint.opt_level(arm.options) or None


def conversion_kind_of_arm(arm: str) -> str:
    """Return "apex" or "native" for the arms that convert to each other, and the name of the backend for others."""
    inner = _arm_that_holds_state(arm)
    return "native" if inner.spec.checkpoint.grad_scaler is not None else inner.backend


def nearest_native_arm(arm: str) -> str:
    """Return the arm of torch.amp, or fp32, that comes nearest to an arm."""
    inner = _arm_that_holds_state(arm)
    if inner.roles is not None and "bf16" in (inner.roles.weights, inner.roles.products):
        return "native:bf16"
    level, scale = _opt_level_of_arm_state(inner), inner.options.get("loss_scale")
    if level is None:
        return "native:fp16"
    if level == "O0":
        return "fp32"
    if isinstance(scale, float):
        return str(Arm.parse(f"native:fp16,init_scale={scale:g},growth_interval={NEVER}"))
    return "native:fp16"


def _scalers_as_grad_scalers(
    state: Mapping[str, Any], was: Arm, level: str | None, result: ConvertedCheckpoint
) -> list[dict[str, Any]]:
    """Return the loss scalers of the source as states of GradScalers."""
    if "amp" in state:
        for name in ("min_loss_scale", "max_loss_scale"):
            if name in was.options:
                result.lost.append(f"{name} {was.options[name]:g}: GradScaler has none")
        given = was.options.get("loss_scale")
        static = given is not None and given != "dynamic"
        return grad_scaler_states_from_apex(
            state["amp"],
            level=level,
            static=static,
            lost_lines=result.lost,
            changed_lines=result.changed,
            for_arm=True,
        )
    if "scaler" in state:
        scalers = [dict(entry) for entry in list_of_one_or_several(state["scaler"])]
    else:
        own = state.get("precision") or {}
        held = {
            "scale": own.get("loss_scale"),
            "_growth_tracker": own.get("good_steps"),
            "growth_interval": 1000,
        }
        scalers = [{**NEW_SCALER, **held}] if {"good_steps", "loss_scale"} <= set(own) else []
    for scaler in filter(None, scalers):
        parse_scale(scaler["scale"], "the loss scale")
    return scalers


def _key_and_precision_state_for_arm(
    target: Arm, level: str | None, scalers: list[dict[str, Any]], result: ConvertedCheckpoint
) -> tuple[str, Any]:
    if level is not None:
        scale = target.options.get("loss_scale")
        if isinstance(scale, float):
            result.changed.append(f"the static scale of {target}, {scale:g}")
            return "amp", {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}
        return "amp", apex_state_from_grad_scalers(
            scalers, level=level, lost_lines=result.lost, changed_lines=result.changed
        )
    has_scaler = target.spec.checkpoint.grad_scaler
    if has_scaler is not None and has_scaler(target.options):
        return "scaler", _grad_scaler_state_for_arm(target, scalers)
    scaled = next((scaler for scaler in scalers if scaler), None)
    static = target.options.get("loss_scale")
    if static == "dynamic":
        return "precision", {} if scaled is None else {"loss_scale": float(scaled["scale"]), "good_steps": 0}
    if scaled is not None:
        result.lost.append(f"the loss scale of {scaled['scale']:g}: {target} has none that moves")
    key = "precision" if has_scaler is None else "scaler"
    return key, {} if static is None else {"loss_scale": static}


def _grad_scaler_state_for_arm(target: Arm, scalers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of the arm's own GradScaler, with scale and count of the source, if any."""
    options = target.options
    interval = int(options.get("growth_interval", APEX_INTERVAL))
    source = next((scaler for scaler in scalers if scaler), None)
    same = source is not None and source["growth_interval"] == interval
    return {
        "scale": float(options.get("init_scale", FIRST_SCALE)) if source is None else float(source["scale"]),
        "growth_factor": float(options.get("growth_factor", NEW_SCALER["growth_factor"])),
        "backoff_factor": float(options.get("backoff_factor", NEW_SCALER["backoff_factor"])),
        "growth_interval": interval,
        "_growth_tracker": int(source["_growth_tracker"]) if source is not None and same else 0,
    }
