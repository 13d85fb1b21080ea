"""The backend `native`: torch.autocast, with torch.amp.GradScaler for fp16."""

from __future__ import annotations

from ampcompare.backends.apex_levels import FIRST_SCALE, GROWTH_INTERVAL
from ampcompare.backends.explanation import (
    HALF_BYTES,
    MASTER_WEIGHT_BYTES,
    ArmExplanation,
    BytesPerParameter,
    apex_script,
    kept_modules,
    native_script,
)
from ampcompare.backends.options import (
    DTYPE_NAMES,
    above_one,
    below_one,
    count,
    float_dtype,
    fp32_or_none,
    full_dtype,
    half_dtype,
    module_patterns,
    positive,
    type_rows,
    with_state,
)
from ampcompare.backends.spec import BackendSpec, CheckpointState, ContractArm, Options

__all__ = ["SPEC"]


def _explain(options: Options) -> ArmExplanation:
    dtype = str(options.get("dtype", "float16"))
    name = DTYPE_NAMES[dtype]
    is_fp16 = dtype == "float16"
    keep = str(options.get("keep_fp32", ""))
    narrow, masters = options.get("weights") == "bfloat16", options.get("masters") == "float32"
    first = options.get("init_scale", FIRST_SCALE)
    interval = options.get("growth_interval", GROWTH_INTERVAL)
    backoff, growth = options.get("backoff_factor", 0.5), options.get("growth_factor", 2.0)
    dynamic = (
        f"dynamic: begins at {first:.0f}; at an overflow times {backoff:g} and the step skipped, times {growth:g} "
        f"after {interval} steps without one"
    )
    return ArmExplanation(
        summary=f"torch.autocast in {name}"
        + (" over bf16 weights" if narrow else "")
        + (" with torch.amp.GradScaler" if is_fp16 else ", without a loss scale"),
        does=(
            ("weights", "are stored in bf16, all but those of batch norm" if narrow else "stay fp32"),
            (
                "casts",
                f"inside the `with`, by torch's lists for the device: products and convolutions to {name}, sensitive "
                f"functions and losses to fp32, the rest unchanged. The lists for CPU and CUDA differ. "
                f"{name} copies of weights are kept until the `with` ends",
            ),
            *kept_modules(keep, rounds_to=None),
            ("inputs, outputs", f"unchanged: a model that ends in a linear layer returns {name}"),
            ("batch norm", f"fp32 weights and statistics, {name} in and out on CUDA"),
            ("master weights", _masters(narrow, masters)),
            ("optimizer", _optimizer(options, narrow, masters)),
            *type_rows(options),
            (
                "loss scale",
                dynamic if is_fp16 else "none: bf16 has the range of fp32, with 8 bits of precision against 11",
            ),
            ("checkpoint", "scaler.state_dict() along with model and optimizer" if is_fp16 else "nothing to add"),
        ),
        twin=("apex:O1" + (f",keep_fp32={keep}" if keep else "")) if is_fp16 else None,
        twin_is="the model for torch.amp; see `ampcompare explain O1` for what differs"
        if is_fp16
        else "NVIDIA's Apex has no bf16: apex:O1 is the same idea in fp16, and apex:O4 that of ROCm's Apex in bf16",
        differs=(),
        script=native_script(dtype, dict(options)),
        twin_script=apex_script({"opt_level": "O1"}) if is_fp16 else (),
    )


def _masters(narrow: bool, masters: bool) -> str:
    if masters:
        return "an fp32 copy of each bf16 weight, in its place in the optimizer"
    if narrow:
        return "none: an update below half a unit in the last place of a weight is lost"
    return "none needed: the weights are fp32"


def _optimizer(options: Options, narrow: bool, masters: bool) -> str:
    if masters:
        return "steps the masters with widened gradients, then rounds them into the model"
    if narrow and "state" in options:
        return "steps fp32 copies of weights and gradients, which last for the step: 8 bytes a parameter"
    return "steps bf16 weights with bf16 gradients and state" if narrow else "steps the fp32 weights"


def _check(options: Options) -> str:
    narrow = options.get("weights")
    if narrow == "float16":
        return "GradScaler does not unscale fp16 gradients; take weights=bf16, or half:masters=fp32,dynamic"
    if narrow and options.get("dtype", "float16") != "bfloat16":
        return "weights=bf16 is for autocast in bf16; write native:bf16,weights=bf16"
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
        if name in options and options.get("dtype") == "bfloat16":
            return f"{name} belongs to a loss scale, which bf16 does not use; take native:fp16, or leave it out"
    for name in ("masters", "grads"):
        if name in options and not narrow:
            return f"the weights are fp32, so {name}=fp32 changes nothing; add weights=bf16, or leave it out"
    if "grads" in options and "masters" not in options:
        return "grads=fp32 accumulates gradients in those of the masters; add masters=fp32"
    return ""


def _unsharded(options: Options) -> str:
    if "weights" in options:
        return "its optimizer steps its own tensors, which are not sharded; use fsdp, whose masters are shards"
    return ""


def _memory(options: Options) -> BytesPerParameter:
    if options.get("masters") == "float32":
        return with_state(MASTER_WEIGHT_BYTES, options)
    return with_state(HALF_BYTES if "weights" in options else BytesPerParameter(4, 4, 0, 0, 2, 4), options)


SPEC = BackendSpec(
    summary="torch.autocast, with torch.amp.GradScaler for fp16",
    implementation="ampcompare.training.precision.native:make_native",
    explain=_explain,
    memory=_memory,
    parsers={
        "dtype": half_dtype,
        "init_scale": positive,
        "growth_factor": above_one,
        "backoff_factor": below_one,
        "growth_interval": count,
        "keep_fp32": module_patterns,
        "weights": float_dtype,
        "masters": fp32_or_none,
        "state": float_dtype,
        "grads": full_dtype,
        "reduce": float_dtype,
    },
    implied={"weights": "float32", "masters": "none"},
    check=_check,
    unsharded=_unsharded,
    elsewhere=lambda options: "",
    positional="dtype",
    default="float16",
    shorthands={
        "amp": "native",
        "fp16": "native:fp16",
        "float16": "native:fp16",
        "bf16": "native:bf16",
        "bfloat16": "native:bf16",
    },
    half=lambda options: DTYPE_NAMES[str(options.get("dtype", "float16"))],
    checkpoint=CheckpointState(
        grad_scaler=lambda options: options.get("dtype", "float16") == "float16",
        master_weights=lambda options: options.get("masters") == "float32",
    ),
    contract=(
        ContractArm("native:fp16", skips_steps=True),
        ContractArm("native:bf16"),
        ContractArm("native:bf16,weights=bf16,masters=fp32,grads=fp32"),
        ContractArm("native:bf16,weights=bf16,state=fp32"),
        ContractArm("native:fp16,state=bf16,reduce=bf16", skips_steps=True),
        ContractArm("native:fp16,keep_fp32=0", skips_steps=True),
    ),
)
