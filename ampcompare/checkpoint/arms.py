"""Carry the state of a run from one arm to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampcompare.arm import Arm
from ampcompare.checkpoint.full import Conversion, copied, into_fp32
from ampcompare.checkpoint.layout import PRECISION_KEYS, as_list, one_or_list
from ampcompare.checkpoint.parts import find_parts
from ampcompare.checkpoint.scalers import APEX_INTERVAL, FIRST_SCALE, NEVER, apex_from_scalers, scalers_from_apex
from ampcompare.errors import ConversionError

__all__ = ["into_arm", "native_twin", "source_kind"]

# backend that keeps a GradScaler: the option that tells its type, and which of its values are fp16
WITH_GRAD_SCALER: dict[str, tuple[tuple[str, tuple[str | None, ...]], ...]] = {
    "native": (("dtype", ("float16", None)),),
    "accelerate": (("mixed_precision", ("fp16",)),),
    "fabric": (("precision", ("16-mixed",)),),
    "mmengine": (("dtype", ("float16",)),),
}
NEW_SCALER = {
    "scale": FIRST_SCALE,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": APEX_INTERVAL,
    "_growth_tracker": 0,
}


def into_arm(state: Mapping[str, Any], arm: str) -> Conversion:
    """Convert a checkpoint of ours into one that another arm goes on from; the source is untouched.

    Weights are fp32 from masters where there are any, so that nothing is lost on the way from O2. A level with masters
    gets them from these weights. Loss scalers keep scale and count as far as the arm has such.

    Args:
        arm: text of the arm that will go on.

    Raises:
        ConversionError: the state is none of ours, or its loss scale is one with which nothing can be trained.
    """
    parts = find_parts(state)
    if parts.arm is None or not parts.models:
        raise ConversionError("it is no checkpoint that a run of ampcompare wrote")
    text = str(Arm.parse(arm))
    was, target = _inner(parts.arm), _inner(arm)
    level = str(target.options.get("opt_level", "O1")) if target.backend == "apex" else None
    was_level = str(was.options.get("opt_level", "O1")) if was.backend == "apex" else None
    result = Conversion(copied(state), source_kind(parts.arm), level or was_level, text)
    scalers = _scalers(state, was, was_level, result)
    into_fp32(parts, result, was_level)
    key, entry = _precision_state(target, level, scalers, result)
    state_now = {name: value for name, value in result.state.items() if name not in PRECISION_KEYS}
    state_now[key] = entry
    masters = [_fp32_entries(model) for model in as_list(state_now["model"])] if _has_masters(target, level) else []
    if masters:
        result.changed.append("fp32 weights are carried as masters too")
    state_now.update(arm=text, engine=None, masters=one_or_list(masters) if masters else {})
    if "zeroed" in state_now:
        state_now["zeroed"] = []
    result.state = state_now
    return result


def _inner(text: str) -> Arm:
    """Parse an arm; one that only packs the activations of another is that other one, as far as its state goes."""
    arm = Arm.parse(text)
    return _inner(str(arm.options.get("over", "fp32")).replace("+", ",")) if arm.backend == "actnn" else arm


def source_kind(arm: str) -> str:
    """Return "apex" or "native" for the arms that convert to each other, and the name of the backend for others."""
    backend = _inner(arm).backend
    return "native" if backend in WITH_GRAD_SCALER else backend


def native_twin(arm: str) -> str:
    """Return the arm of torch.amp, or fp32, that comes nearest to an Apex arm; native:fp16 for others."""
    if source_kind(arm) != "apex":
        return "native:fp16"
    options = _inner(arm).options
    level, scale = options.get("opt_level", "O1"), options.get("loss_scale")
    if level == "O0":
        return "fp32"
    if isinstance(scale, float):
        return str(Arm.parse(f"native:fp16,init_scale={scale:g},growth_interval={NEVER}"))
    return "native:fp16"


def _scalers(state: Mapping[str, Any], was: Arm, level: str | None, result: Conversion) -> list[dict[str, Any]]:
    """Return the loss scalers of the source as states of GradScalers."""
    if "amp" in state:
        for name in ("min_loss_scale", "max_loss_scale"):
            if name in was.options:
                result.lost.append(f"{name} {was.options[name]:g}: GradScaler has none")
        given = was.options.get("loss_scale")
        static = float(given) if given is not None and given != "dynamic" else None
        return scalers_from_apex(state["amp"], level=level, static=static, lost=result.lost, changed=result.changed)
    if "scaler" in state:
        return [dict(entry) for entry in as_list(state["scaler"])]
    own = state.get("precision") or {}
    if "good_steps" not in own:
        return []
    return [{**NEW_SCALER, "scale": own["loss_scale"], "_growth_tracker": own["good_steps"], "growth_interval": 1000}]


def _precision_state(
    target: Arm, level: str | None, scalers: list[dict[str, Any]], result: Conversion
) -> tuple[str, Any]:
    if level is not None:
        scale = target.options.get("loss_scale")
        if isinstance(scale, float):
            result.changed.append(f"the static scale of {target}, {scale:g}")
            return "amp", {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}
        return "amp", apex_from_scalers(scalers, level=level, lost=result.lost, changed=result.changed)
    if any(target.options.get(name) in of_fp16 for name, of_fp16 in WITH_GRAD_SCALER.get(target.backend, ())):
        return "scaler", _grad_scaler(target, scalers)
    scaled = next((scaler for scaler in scalers if scaler), None)
    static = target.options.get("loss_scale")
    if static == "dynamic":
        return "precision", {} if scaled is None else {"loss_scale": float(scaled["scale"]), "good_steps": 0}
    if scaled is not None:
        result.lost.append(f"the loss scale of {scaled['scale']:g}: {target} has none that moves")
    key = "scaler" if target.backend in WITH_GRAD_SCALER else "precision"
    return key, {} if static is None else {"loss_scale": static}


def _grad_scaler(target: Arm, scalers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of the arm's own GradScaler, with scale and count of the source where it had any."""
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


def _has_masters(target: Arm, level: str | None) -> bool:
    if target.backend == "half":
        return bool(target.options.get("master_weights"))
    return bool(target.options.get("master_weights", level == "O2")) and level in ("O2", "O3")


def _fp32_entries(model: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in model.items() if isinstance(value, Tensor) and value.dtype is torch.float32}
