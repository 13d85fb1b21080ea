"""The backend `apex`: `apex.amp` at an opt level, from the real Apex or from ampcompare's own engine."""

from __future__ import annotations

from ampcompare.backends.apex_explanation import explain_apex
from ampcompare.backends.apex_levels import LEVELS, ROCM_LEVELS, apex_level
from ampcompare.backends.explanation import FP32_BYTES, HALF_BYTES, MASTER_WEIGHT_BYTES, BytesPerParameter
from ampcompare.backends.options import choice, flag, float_dtype, loss_scale, module_patterns, positive
from ampcompare.backends.spec import BackendSpec, CheckpointState, ContractArm, Options

__all__ = ["SPEC"]


def _opt_level(text: str) -> str:
    if text.upper() in LEVELS:
        return text.upper()
    if text[:1] == "0" and f"O{text[1:]}" in LEVELS:
        raise ValueError(f"an opt level begins with the letter O, not with a zero: write O{text[1:]}")
    raise ValueError(f"expected one of {', '.join(LEVELS)}")


def _memory(options: Options) -> BytesPerParameter:
    level = apex_level(options)
    if level.is_half:
        return MASTER_WEIGHT_BYTES if level.master_weights else HALF_BYTES
    return BytesPerParameter(4, 4, 0, 0, 2, 4) if level.patch_torch_functions else FP32_BYTES


def _master_weights(options: Options) -> bool:
    level = apex_level(options)
    return bool(level.master_weights) and level.is_half


def _half(options: Options) -> str:
    level = apex_level(options)
    return level.half_name if level.is_half or level.patch_torch_functions else ""


def _check(options: Options) -> str:
    if options.get("opt_level") in ROCM_LEVELS and options.get("engine") == "nvidia":
        return f"{options['opt_level']} is a level of ROCm's Apex, which NVIDIA's does not have; use engine=compat"
    low, high = options.get("min_loss_scale"), options.get("max_loss_scale")
    if low is not None and high is not None and low > high:
        return f"min_loss_scale={low:g} is above max_loss_scale={high:g}"
    if "keep_fp32" in options and options.get("opt_level") == "O0":
        return "O0 already keeps every module in fp32; leave keep_fp32 out"
    return ""


SPEC = BackendSpec(
    elsewhere=lambda options: "Apex, and the engine that reproduces it, support CPU and CUDA tensors only",
    unsharded=lambda options: "Apex keeps masters and fp16 gradients in whole tensors; fsdp is the successor of O2",
    summary="apex.amp at an opt level: O0 to O3, and O4 and O5 of ROCm's Apex, in bf16",
    implementation="ampcompare.precision.apex:make_apex",
    explain=explain_apex,
    memory=_memory,
    parsers={
        "opt_level": _opt_level,
        "loss_scale": loss_scale,
        "keep_batchnorm_fp32": flag,
        "master_weights": flag,
        "cast_model_outputs": float_dtype,
        "min_loss_scale": positive,
        "max_loss_scale": positive,
        "keep_fp32": module_patterns,
        "engine": choice("auto", "nvidia", "compat"),
    },
    positional="opt_level",
    default="O1",
    shorthands={level.lower(): f"apex:{level}" for level in LEVELS},
    implied={"engine": "auto"},
    check=_check,
    half=_half,
    checkpoint=CheckpointState(master_weights=_master_weights),
    contract=(
        ContractArm("apex:O0,engine=compat"),
        ContractArm("apex:O1,engine=compat", skips_steps=True),
        ContractArm("apex:O1,loss_scale=128,engine=compat"),
        ContractArm("apex:O1,keep_fp32=0,engine=compat", skips_steps=True),
        ContractArm("apex:O2,engine=compat", skips_steps=True),
        ContractArm("apex:O2,loss_scale=128,engine=compat"),
        ContractArm("apex:O2,keep_fp32=Linear,engine=compat", skips_steps=True),
        ContractArm("apex:O3,engine=compat"),
        ContractArm("apex:O3,keep_fp32=0|1,engine=compat"),
        ContractArm("apex:O3,loss_scale=dynamic,engine=compat", skips_steps=True),
        ContractArm("apex:O4,engine=compat"),
        ContractArm("apex:O5,engine=compat"),
        ContractArm("apex:O5,loss_scale=dynamic,keep_fp32=2,engine=compat", skips_steps=True),
    ),
)
