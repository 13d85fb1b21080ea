"""The backend `native`: torch.autocast, with torch.amp.GradScaler for fp16."""

from ampcompare.backends.apex_levels import FIRST_SCALE, GROWTH_INTERVAL
from ampcompare.backends.explanation import ArmExplanation, explanation_rows_of_roles, native_script_lines
from ampcompare.backends.options import (
    DTYPE_NAMES,
    float_dtype,
    fp32_or_none,
    full_dtype,
    half_dtype,
    make_choice_parser,
    parse_count,
    parse_flag,
    parse_module_patterns,
    parse_number_above_one,
    parse_number_between_zero_and_one,
    parse_positive_number,
    roles_with_types,
    why_types_conflict,
)
from ampcompare.backends.roles import BATCH_NORM, LossScale, Roles
from ampcompare.backends.spec import BackendSpec, CheckpointState, ContractTestArm, InScript, Options


def _roles_for_options(options: Options) -> Roles:
    products = DTYPE_NAMES[str(options.get("dtype", "float16"))]
    weights = DTYPE_NAMES[str(options.get("weights", "float32"))]
    scale = LossScale(
        float(options.get("init_scale", FIRST_SCALE)),
        int(options.get("growth_interval", GROWTH_INTERVAL)),
        float(options.get("growth_factor", 2.0)),
        float(options.get("backoff_factor", 0.5)),
    )
    base = Roles(
        weights=weights,
        products=products,
        lists="autocast",
        masters="fp32" if options.get("masters") == "float32" else "",
        loss_scale=scale if products == "fp16" else None,
        kept=() if weights == "fp32" else (BATCH_NORM,),
    )
    return roles_with_types(base, options)


BF16_OF_ROCM = (
    "NVIDIA's Apex has no bf16: apex:O1 is the same idea in fp16, and apex:O4 that of ROCm's Apex in bf16"
)


def _explain_arm(options: Options) -> ArmExplanation:
    dtype = str(options.get("dtype", "float16"))
    name = DTYPE_NAMES[dtype]
    is_fp16 = dtype == "float16"
    keep = str(options.get("keep_fp32", ""))
    roles = _roles_for_options(options)
    summary = f"torch.autocast in {name}"
    summary += " over bf16 weights" if roles.weights != "fp32" else ""
    summary += " with torch.amp.GradScaler" if is_fp16 else ", without a loss scale"
    twin, twin_is = None, BF16_OF_ROCM
    if is_fp16:
        twin = f"apex:O1,keep_fp32={keep}" if keep else "apex:O1"
        twin_is = "the model for torch.amp; see `ampcompare explain O1` for what differs"
    casts = (
        f"inside the `with`, by torch's lists: products and convolutions to {name}, sensitive functions and losses to "
        f"fp32, the rest unchanged. A CPU casts by those for CUDA unless autocast_lists is cpu. {name} copies of "
        "weights are kept until the `with` ends"
    )
    return ArmExplanation(
        summary=summary,
        does=explanation_rows_of_roles(
            roles,
            casts=[("casts", casts)],
            borders=f"unchanged: a model that ends in a linear layer returns {name}",
        ),
        twin=twin,
        twin_is=twin_is,
        differs=(),
        script=native_script_lines(dtype, dict(options)),
    )


def _why_options_invalid(options: Options) -> str:
    narrow = options.get("weights")
    if narrow == "float16":
        return "GradScaler does not unscale fp16 gradients; take weights=bf16, or half:masters=fp32,dynamic"
    if narrow and options.get("dtype", "float16") != "bfloat16":
        return "weights=bf16 is for autocast in bf16; write native:bf16,weights=bf16"
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
        if name in options and options.get("dtype") == "bfloat16":
            return (
                f"{name} belongs to a loss scale, which bf16 does not use; take native:fp16, or leave it out"
            )
    return why_types_conflict(_roles_for_options(options), options)


def _why_not_shardable(options: Options) -> str:
    if "weights" in options:
        return (
            "its optimizer steps its own tensors, which are not sharded; use fsdp, whose masters are shards"
        )
    return ""


SPEC = BackendSpec(
    summary="torch.autocast, with torch.amp.GradScaler for fp16",
    implementation="ampcompare.training.precision.native:make_native",
    explain=_explain_arm,
    roles=_roles_for_options,
    parsers={
        "dtype": half_dtype,
        "init_scale": parse_positive_number,
        "growth_factor": parse_number_above_one,
        "backoff_factor": parse_number_between_zero_and_one,
        "growth_interval": parse_count,
        "keep_fp32": parse_module_patterns,
        "weights": float_dtype,
        "masters": fp32_or_none,
        "state": float_dtype,
        "grads": full_dtype,
        "reduce": float_dtype,
        "rounding": make_choice_parser("nearest", "stochastic"),
        "kahan": parse_flag,
    },
    implied={"weights": "float32", "masters": "none", "rounding": "nearest", "kahan": False},
    check=_why_options_invalid,
    unsharded=_why_not_shardable,
    elsewhere=lambda options: "",
    positional="dtype",
    default="float16",
    shorthands={
        "amp": "native",
        "fp16": "native:fp16",
        "float16": "native:fp16",
        "bf16": "native:bf16",
        "bfloat16": "native:bf16",
        "16-mixed": "native:fp16",  # as Lightning and Fabric call it
        "bf16-mixed": "native:bf16",
    },
    checkpoint=CheckpointState(grad_scaler=lambda options: options.get("dtype", "float16") == "float16"),
    in_script=InScript(),
    contract=(
        ContractTestArm("native:fp16", skips_steps=True),
        ContractTestArm("native:bf16"),
        ContractTestArm("native:bf16,weights=bf16,masters=fp32,grads=fp32"),
        ContractTestArm("native:bf16,weights=bf16,state=fp32"),
        ContractTestArm("native:bf16,weights=bf16,kahan"),
        ContractTestArm("native:fp16,state=bf16,reduce=bf16", skips_steps=True),
        ContractTestArm("native:fp16,keep_fp32=0", skips_steps=True),
    ),
)
