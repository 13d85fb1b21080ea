"""The backend `half`: manual `.half()`, optionally with fp32 master weights and a loss scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ampcompare.backends.apex_levels import FIRST_SCALE
from ampcompare.backends.explanation import (
    HALF_BYTES,
    MASTER_WEIGHT_BYTES,
    ArmExplanation,
    BytesPerParameter,
    apex_script,
    half_script,
    kept_modules,
)
from ampcompare.backends.options import (
    DTYPE_NAMES,
    choice,
    count,
    flag,
    float_dtype,
    full_dtype,
    half_dtype,
    loss_scale,
    module_patterns,
    positive,
    type_rows,
    with_state,
)
from ampcompare.backends.spec import BackendSpec, CheckpointState, ContractArm, Options

__all__ = ["SPEC"]

GROWTH_INTERVAL = 1000  # of fp16_utils and DeepSpeed


def _explain(options: Options) -> ArmExplanation:
    dtype = str(options.get("dtype", "float16"))
    name = DTYPE_NAMES[dtype]
    bn_fp32, masters = bool(options.get("bn_fp32")), bool(options.get("master_weights"))
    scale, keep = options.get("loss_scale"), str(options.get("keep_fp32", ""))
    twin: dict[str, Any] = {}
    if dtype == "float16":
        twin = {"opt_level": "O2" if masters else "O3"}
        twin_scale = (scale or 1.0) if masters else scale  # O2 would scale by itself
        if twin_scale is not None:
            twin["loss_scale"] = twin_scale
        if masters or bn_fp32:
            twin["keep_batchnorm_fp32"] = bn_fp32
        if keep:
            twin["keep_fp32"] = keep
    types = [word for word in ("state", "grads", "reduce", "rounding", "kahan") if options.get(word)]
    added = [*(["fp32 masters"] if masters else []), *(["a dynamic loss scale"] if scale == "dynamic" else [])]
    return ArmExplanation(
        summary=f"the whole model in {name}, as scripts do it by hand"
        + (", batch norm in fp32" if bn_fp32 else "")
        + (f", with {' and '.join(added)} as in fp16 optimizers" if added else ""),
        does=(
            ("weights", f"become {name}, all" + (" but those of batch norm" if bn_fp32 else "")),
            *kept_modules(keep, rounds_to=name),
            ("casts", "none inside the model: an operation runs in the type of its inputs"),
            ("inputs, outputs", f"floating inputs become {name}, outputs fp32, so losses outside are in fp32"),
            (
                "batch norm",
                f"fp32 weights and statistics, {name} in and out" if bn_fp32 else f"{name} weights and statistics",
            ),
            ("master weights", _masters(options, name)),
            ("optimizer", _optimizer(options, name)),
            *type_rows(options),
            ("loss scale", _loss_scale(options, name)),
            ("checkpoint", f"model.state_dict() holds {name} weights" + (", masters are not in it" if masters else "")),
        ),
        twin="apex:" + ",".join(f"{key}={value}" for key, value in twin.items()) if twin else None,
        twin_is="the same numbers, through Apex"
        if twin and not added and not types
        else "the same idea, through Apex"
        if twin
        else "NVIDIA's Apex has no bf16; apex:O5 of ROCm's has these numbers, with batch norm in fp32"
        if masters
        else "Apex has no level in bf16 alone; its nearest is apex:O3, in fp16",
        differs=(),
        script=half_script(dtype, bn_fp32, scale, master_weights=masters),
        twin_script=apex_script(twin) if twin else (),
    )


def _is_wide(options: Options) -> bool:
    """Return whether steps run on temporary fp32 copies."""
    given = options.get("kahan") or "rounding" in options or "state" in options
    return bool(given) and not options.get("master_weights")


def _masters(options: Options, name: str) -> str:
    if options.get("master_weights"):
        return f"an fp32 copy of each {name} weight, in its place in the optimizer"
    if options.get("kahan"):
        return f"none: the rounding error is kept in {name} and added before the next step (Kahan summation)"
    if "rounding" in options:
        return f"none: updated weights are rounded to {name} stochastically, so that small updates are kept on average"
    return "none: an update below half a unit in the last place of a weight is lost"


def _optimizer(options: Options, name: str) -> str:
    if options.get("master_weights"):
        return "steps the masters with widened gradients and fp32 state, then rounds them into the model"
    if _is_wide(options):
        held = "" if "state" in options else f", and its state is held in {name}"
        return f"steps fp32 copies of weights and gradients, which last for the step: 8 bytes a parameter{held}"
    eps = "; Adam's eps of 1e-8 is 0 there" if name == "fp16" else ""
    return f"steps {name} weights with {name} gradients and state{eps}"


def _loss_scale(options: Options, name: str) -> str:
    scale = options.get("loss_scale")
    if scale is None:
        return "none: gradients below 2**-25 become 0" if name == "fp16" else "none"
    if scale == "dynamic":
        first = options.get("init_scale", FIRST_SCALE)
        interval = options.get("growth_interval", GROWTH_INTERVAL)
        return (
            f"dynamic: begins at {first:.0f}; an overflow skips the step and halves it, down to 1; "
            f"{interval} steps without one double it"
        )
    return f"static at {scale:g}: divided out once per step, overflows are not checked"


def _check(options: Options) -> str:
    if options.get("loss_scale") != "dynamic":
        for name in ("init_scale", "growth_interval"):
            if name in options:
                return f"{name} belongs to a dynamic loss scale; add dynamic, or leave it out"
    if options.get("master_weights"):
        for name in ("rounding", "kahan"):
            if options.get(name):
                return f"{name} keeps updates that 16-bit weights lose, but masters lose none; leave one of them out"
    elif "grads" in options:
        return "grads=fp32 accumulates gradients in those of the masters; add masters=fp32"
    if "rounding" in options and options.get("kahan"):
        return "rounding=stochastic and kahan both keep small updates; leave one of them out"
    if "rounding" in options and options.get("dtype", "float16") != "bfloat16":
        return "rounding=stochastic is for bf16; write half:bf16,rounding=stochastic"
    return ""


def _unsharded(options: Options) -> str:
    own = [name for name in options if name != "dtype" and options[name]]
    if options.get("dtype", "float16") != "bfloat16":
        return "sharded fp16 weights have neither masters nor a loss scale; use fsdp:param=fp16, which has both"
    if own:
        return f"{', '.join(own)} needs whole weights; use half:bf16, or fsdp, whose masters are fp32 shards"
    return ""


def _memory(options: Options) -> BytesPerParameter:
    held = with_state(MASTER_WEIGHT_BYTES if options.get("master_weights") else HALF_BYTES, options)
    return replace(held, compensation=2) if options.get("kahan") else held


SPEC = BackendSpec(
    summary="manual .half(): 16-bit weights; masters, a loss scale, other types and roundings as options",
    implementation="ampcompare.training.precision.half:make_half",
    explain=_explain,
    memory=_memory,
    parsers={
        "dtype": half_dtype,
        "bn_fp32": flag,
        "master_weights": flag,
        "loss_scale": loss_scale,
        "init_scale": positive,
        "growth_interval": count,
        "keep_fp32": module_patterns,
        "state": float_dtype,
        "grads": full_dtype,
        "reduce": float_dtype,
        "rounding": choice("nearest", "stochastic"),
        "kahan": flag,
    },
    aliases={
        "dynamic": "loss_scale=dynamic",
        "fp16": "dtype=fp16",
        "bf16": "dtype=bf16",
        "weights=fp16": "dtype=fp16",
        "weights=bf16": "dtype=bf16",
        "masters=fp32": "master_weights=true",
        "masters=none": "master_weights=false",
    },
    implied={
        "dtype": "float16",
        "bn_fp32": False,
        "master_weights": False,
        "rounding": "nearest",
        "kahan": False,
    },
    check=_check,
    unsharded=_unsharded,
    elsewhere=lambda options: "",
    half=lambda options: DTYPE_NAMES[str(options.get("dtype", "float16"))],
    checkpoint=CheckpointState(master_weights=lambda options: bool(options.get("master_weights"))),
    contract=(
        ContractArm("half"),
        ContractArm("half:bn_fp32"),
        ContractArm("half:dtype=bf16"),
        ContractArm("half:keep_fp32=0|BatchNorm1d"),
        ContractArm("half:loss_scale=128"),
        ContractArm("half:dynamic", skips_steps=True),
        ContractArm("half:master_weights"),
        ContractArm("half:master_weights,loss_scale=128"),
        ContractArm("half:master_weights,dynamic", skips_steps=True),
        ContractArm("half:bf16,masters=fp32,state=bf16,grads=fp32,reduce=fp32"),
        ContractArm("half:bf16,state=fp32"),
        ContractArm("half:bf16,rounding=stochastic"),
        ContractArm("half:bf16,kahan"),
        ContractArm("half:kahan,dynamic,keep_fp32=0", skips_steps=True),
        ContractArm("half:master_weights,dynamic,keep_fp32=2", skips_steps=True),
    ),
)
