"""The backend `half`: manual `.half()`, optionally with fp32 master weights and a loss scale."""

from typing import Any

from ampcompare.backends.apex_levels import FIRST_SCALE
from ampcompare.backends.explanation import ArmExplanation, explanation_rows_of_roles, half_script_lines
from ampcompare.backends.options import (
    DTYPE_NAMES,
    float_dtype,
    full_dtype,
    half_dtype,
    make_choice_parser,
    parse_count,
    parse_flag,
    parse_loss_scale,
    parse_module_patterns,
    parse_positive_number,
    roles_with_types,
    why_types_conflict,
)
from ampcompare.backends.roles import BATCH_NORM, LossScale, Roles
from ampcompare.backends.spec import BackendSpec, ContractTestArm, InScript, Options

GROWTH_INTERVAL = 1000  # of fp16_utils and DeepSpeed


def _roles_for_options(options: Options) -> Roles:
    scale = options.get("loss_scale")
    loss_scale = None
    if scale == "dynamic":
        first = float(options.get("init_scale", FIRST_SCALE))
        loss_scale = LossScale(first, int(options.get("growth_interval", GROWTH_INTERVAL)), lowest=1.0)
    elif scale not in (None, 1):
        loss_scale = LossScale(float(scale))
    base = Roles(
        weights=DTYPE_NAMES[str(options.get("dtype", "float16"))],
        masters="fp32" if options.get("master_weights") else "",
        loss_scale=loss_scale,
        kept=(BATCH_NORM,) if options.get("bn_fp32") else (),
    )
    return roles_with_types(base, options)


def _explain_arm(options: Options) -> ArmExplanation:
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
    added = ["fp32 masters"] if masters else []
    if scale == "dynamic":
        added.append("a dynamic loss scale")
    return ArmExplanation(
        summary=f"the whole model in {name}, as scripts do it by hand"
        + (", batch norm in fp32" if bn_fp32 else "")
        + (f", with {' and '.join(added)} as in fp16 optimizers" if added else ""),
        does=explanation_rows_of_roles(
            _roles_for_options(options),
            borders=f"floating inputs become {name}, outputs fp32, so losses outside are in fp32",
        ),
        twin="apex:" + ",".join(f"{key}={value}" for key, value in twin.items()) if twin else None,
        twin_is=_equivalent_in_apex_text(
            has_twin=bool(twin), is_equal=not added and not types, masters=masters
        ),
        differs=(),
        script=half_script_lines(dtype, bn_fp32, scale, master_weights=masters),
    )


def _equivalent_in_apex_text(*, has_twin: bool, is_equal: bool, masters: bool) -> str:
    """Return what Apex has for an arm.

    Args:
        has_twin: a level of Apex trains so.
        is_equal: nothing is added that the level lacks.
        masters: the arm has fp32 master weights.
    """
    if has_twin:
        return "the same numbers, through Apex" if is_equal else "the same idea, through Apex"
    if masters:
        return "NVIDIA's Apex has no bf16; apex:O5 of ROCm's has these numbers, with batch norm in fp32"
    return "Apex has no level in bf16 alone; its nearest is apex:O3, in fp16"


def _why_options_invalid(options: Options) -> str:
    if options.get("loss_scale") != "dynamic":
        for name in ("init_scale", "growth_interval"):
            if name in options:
                return f"{name} belongs to a dynamic loss scale; add dynamic, or leave it out"
    return why_types_conflict(_roles_for_options(options), options)


def _why_not_shardable(options: Options) -> str:
    own = [name for name in options if name != "dtype" and options[name]]
    if options.get("dtype", "float16") != "bfloat16":
        return "sharded fp16 weights have neither masters nor a loss scale; use fsdp:fp16, which has both"
    if own:
        return f"{', '.join(own)} needs whole weights; use half:bf16, or fsdp, whose masters are fp32 shards"
    return ""


SPEC = BackendSpec(
    summary="manual .half(): 16-bit weights; masters, a loss scale, other types and roundings as options",
    implementation="ampcompare.training.precision.half:Half",
    explain=_explain_arm,
    roles=_roles_for_options,
    parsers={
        "dtype": half_dtype,
        "bn_fp32": parse_flag,
        "master_weights": parse_flag,
        "loss_scale": parse_loss_scale,
        "init_scale": parse_positive_number,
        "growth_interval": parse_count,
        "keep_fp32": parse_module_patterns,
        "state": float_dtype,
        "grads": full_dtype,
        "reduce": float_dtype,
        "rounding": make_choice_parser("nearest", "stochastic"),
        "kahan": parse_flag,
    },
    shorthands={"16-true": "half", "bf16-true": "half:bf16"},
    aliases={
        "dynamic": "loss_scale=dynamic",
        "fp16": "dtype=fp16",
        "bf16": "dtype=bf16",
        "weights=fp16": "dtype=fp16",
        "weights=bf16": "dtype=bf16",
        "masters=fp32": "master_weights=true",
        "masters=none": "master_weights=false",
    },
    spellings={"dtype=bf16": "bf16", "master_weights": "masters=fp32", "loss_scale=dynamic": "dynamic"},
    implied={
        "dtype": "float16",
        "bn_fp32": False,
        "master_weights": False,
        "rounding": "nearest",
        "kahan": False,
    },
    check=_why_options_invalid,
    unsharded=_why_not_shardable,
    elsewhere=lambda options: "",
    in_script=InScript(),
    contract=(
        ContractTestArm("half"),
        ContractTestArm("half:bn_fp32"),
        ContractTestArm("half:bf16"),
        ContractTestArm("half:keep_fp32=0|BatchNorm1d"),
        ContractTestArm("half:loss_scale=128"),
        ContractTestArm("half:dynamic", skips_steps=True),
        ContractTestArm("half:masters=fp32"),
        ContractTestArm("half:masters=fp32,loss_scale=128"),
        ContractTestArm("half:masters=fp32,dynamic", skips_steps=True),
        ContractTestArm("half:bf16,masters=fp32,state=bf16,grads=fp32,reduce=fp32"),
        ContractTestArm("half:bf16,state=fp32"),
        ContractTestArm("half:bf16,rounding=stochastic"),
        ContractTestArm("half:bf16,kahan"),
        ContractTestArm("half:kahan,dynamic,keep_fp32=0", skips_steps=True),
        ContractTestArm("half:masters=fp32,dynamic,keep_fp32=2", skips_steps=True),
    ),
)
