"""The backend `native`: torch.autocast, with torch.amp.GradScaler for fp16."""

from __future__ import annotations

from ampcompare.backends.apex_levels import FIRST_SCALE, GROWTH_INTERVAL
from ampcompare.backends.explanation import ArmExplanation, BytesPerParameter, kept_modules
from ampcompare.backends.options import DTYPE_NAMES, above_one, below_one, count, half_dtype, module_patterns, positive
from ampcompare.backends.scripts import apex_script, native_script
from ampcompare.backends.spec import BackendSpec, CheckpointState, ContractArm, Options

__all__ = ["SPEC"]


def _explain(options: Options) -> ArmExplanation:
    """Explain a `native` arm with its options."""
    dtype = str(options.get("dtype", "float16"))
    name = DTYPE_NAMES[dtype]
    is_fp16 = dtype == "float16"
    keep = str(options.get("keep_fp32", ""))
    first = options.get("init_scale", FIRST_SCALE)
    interval = options.get("growth_interval", GROWTH_INTERVAL)
    backoff, growth = options.get("backoff_factor", 0.5), options.get("growth_factor", 2.0)
    dynamic = (
        f"dynamic: begins at {first:.0f}; at an overflow times {backoff:g} and the step skipped, times {growth:g} "
        f"after {interval} steps without one"
    )
    return ArmExplanation(
        summary=f"torch.autocast in {name}" + (" with torch.amp.GradScaler" if is_fp16 else ", without a loss scale"),
        does=(
            ("weights", "stay fp32"),
            (
                "casts",
                f"inside the `with`, by torch's lists for the device: products and convolutions to {name}, sensitive "
                "functions and losses to fp32, the rest as it comes. The lists for CPU and CUDA are not the same. "
                f"{name} copies of weights are kept until the `with` ends",
            ),
            *kept_modules(keep, rounds_to=None),
            ("inputs, outputs", f"as they come: a model that ends in a linear layer returns {name}"),
            ("batch norm", f"fp32 weights and statistics, {name} in and out on CUDA"),
            ("master weights", "none needed: the weights are fp32"),
            ("optimizer", "steps the fp32 weights"),
            (
                "loss scale",
                dynamic if is_fp16 else "none: bf16 has the range of fp32, with 8 bits of precision against 11",
            ),
            ("checkpoint", "scaler.state_dict() along with model and optimizer" if is_fp16 else "nothing to add"),
        ),
        twin=("apex:O1" + (f",keep_fp32={keep}" if keep else "")) if is_fp16 else None,
        twin_is="what torch.amp was made from; see `ampcompare explain O1` for what differs"
        if is_fp16
        else "Apex knows no bf16; its nearest arm is apex:O1, in fp16 with a loss scale",
        differs=(),
        script=native_script(dtype, dict(options)),
        twin_script=apex_script({"opt_level": "O1"}) if is_fp16 else (),
    )


SPEC = BackendSpec(
    summary="torch.autocast, with torch.amp.GradScaler for fp16",
    implementation="ampcompare.precision.native:Native",
    explain=_explain,
    memory=lambda options: BytesPerParameter(4, 4, 0, 0, 2, 4),
    parsers={
        "dtype": half_dtype,
        "init_scale": positive,
        "growth_factor": above_one,
        "backoff_factor": below_one,
        "growth_interval": count,
        "keep_fp32": module_patterns,
    },
    positional="dtype",
    default="float16",
    shorthands={
        "amp": "native",
        "fp16": "native:fp16",
        "float16": "native:fp16",
        "bf16": "native:bf16",
        "bfloat16": "native:bf16",
    },
    checkpoint=CheckpointState(grad_scaler=lambda options: options.get("dtype", "float16") == "float16"),
    contract=(
        ContractArm("native:fp16", skips_steps=True),
        ContractArm("native:bf16"),
        ContractArm("native:fp16,keep_fp32=0", skips_steps=True),
    ),
)
