"""The backend `fsdp`: torch's FSDP2 with its own mixed precision, the successor of O2 on several GPUs."""

from typing import Any

from ampcompare.backends.apex_levels import FIRST_SCALE, GROWTH_INTERVAL
from ampcompare.backends.explanation import PLAIN_STEP, ArmExplanation, grad_scaler_line
from ampcompare.backends.options import (
    DTYPE_NAMES,
    float_dtype,
    half_dtype,
    parse_count,
    parse_module_patterns,
    parse_positive_number,
)
from ampcompare.backends.roles import BATCH_NORM, LossScale, Roles
from ampcompare.backends.spec import BackendSpec, CheckpointState, ContractTestArm, Options


def _is_fp16(options: Options) -> bool:
    return options.get("param") == "float16"


def _roles_for_options(options: Options) -> Roles:
    first, interval = options.get("init_scale", FIRST_SCALE), options.get("growth_interval", GROWTH_INTERVAL)
    return Roles(
        products=DTYPE_NAMES[_type_arguments_of_policy(options)["param_dtype"]],
        reduction=DTYPE_NAMES[_type_arguments_of_policy(options)["reduce_dtype"]],
        loss_scale=LossScale(float(first), int(interval)) if _is_fp16(options) else None,
        kept=(BATCH_NORM, *filter(None, str(options.get("keep_fp32", "")).split("|"))),
    )


def _explain_arm(options: Options) -> ArmExplanation:
    types = _type_arguments_of_policy(options)
    param, reduce, output = (DTYPE_NAMES[name] for name in types.values())
    keep = ", ".join(str(options.get("keep_fp32", "")).split("|"))
    wide = f"batch norms{' and ' + keep if keep else ''}"
    return ArmExplanation(
        summary=f"fully_shard: fp32 weights in shards over ranks, gathered in {param} to compute; the successor of O2",
        does=(
            ("weights", "an fp32 shard on each rank: on N ranks each holds one Nth of every weight"),
            (
                "casts",
                f"a unit of the model, such as a block, is gathered in {param} before it computes and freed after; its "
                "floating inputs are cast",
            ),
            ("kept in fp32", f"{wide}: gathered and computed in fp32, {param} out"),
            ("inputs, outputs", f"what the model returns becomes {output}"),
            ("master weights", "the shards: O2 keeps a whole fp32 copy on each rank"),
            ("gradients", f"reduced in {reduce} over ranks, and kept as fp32 shards"),
            ("optimizer", "steps the fp32 shards with fp32 state in shards, which no rank has in full"),
            (
                "bytes",
                "per parameter and rank, on N ranks: (4 + 4 + 4 for each tensor of state) / N for weight, gradient and "
                f"state (16/N with Adam, where O2 holds 20), and 2 in {param} for a unit while it is gathered",
            ),
            ("loss scale", _loss_scale_text(options)),
            (
                "checkpoint",
                "whole weights and state, gathered by rank 0: another number of ranks can resume from it",
            ),
        ),
        twin="apex:O2" if _is_fp16(options) else "apex:O5",
        twin_is=f"the same idea with whole weights on each rank: {param} to compute, fp32 masters to step",
        differs=(
            "memory of weights, gradients and state falls with the number of ranks",
            "every forward and backward pass gathers the weights: more traffic between ranks",
            "gradients are widened before they are added over ranks"
            if reduce == "fp32"
            else f"sums in {reduce}",
        ),
        script=_script_lines(types, options),
    )


def _type_arguments_of_policy(options: Options) -> dict[str, str]:
    """Return the arguments of `MixedPrecisionPolicy`, as names of torch's types."""
    return {
        "param_dtype": str(options.get("param", "bfloat16")),
        "reduce_dtype": str(options.get("reduce", "float32")),
        "output_dtype": str(options.get("output", "float32")),
    }


def _loss_scale_text(options: Options) -> str:
    if not _is_fp16(options):
        return "none: bf16 has the range of fp32"
    first, interval = options.get("init_scale", FIRST_SCALE), options.get("growth_interval", GROWTH_INTERVAL)
    return (
        f"dynamic: begins at {first:.0f}; an overflow in the shard of any rank skips the step on all and halves it, "
        f"{interval} steps without one double it"
    )


def _script_lines(types: dict[str, str], options: Options) -> tuple[str, ...]:
    words = ", ".join(f"{name}=torch.{value}" for name, value in types.items())
    start = (
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # under torchrun",
        f"policy = MixedPrecisionPolicy({words})",
        "for block in model.blocks:",
        "    fully_shard(block, mp_policy=policy)",
        "fully_shard(model, mp_policy=policy)  # before the optimizer is made",
    )
    if not _is_fp16(options):
        return (*start, *PLAIN_STEP)
    return (
        *start,
        f"{grad_scaler_line(options)}  # its overflow flag is shared by all ranks",
        "scaler.scale(criterion(model(x), y)).backward()",
        "scaler.unscale_(optimizer)",
        "clip_grad_norm_(model.parameters(), 1.0)",
        "scaler.step(optimizer)",
        "scaler.update()",
    )


def _why_options_invalid(options: Options) -> str:
    scaling: list[Any] = [name for name in ("init_scale", "growth_interval") if name in options]
    if scaling and not _is_fp16(options):
        return f"{scaling[0]} belongs to a loss scale, which bf16 does not need; add fp16, or leave it out"
    return ""


SPEC = BackendSpec(
    summary="FSDP2: fp32 weights in shards over ranks, gathered in bf16 or fp16; the successor of O2",
    implementation="ampcompare.training.precision.fsdp:FullyShard",
    explain=_explain_arm,
    roles=_roles_for_options,
    parsers={
        "param": half_dtype,
        "reduce": float_dtype,
        "output": float_dtype,
        "keep_fp32": parse_module_patterns,
        "init_scale": parse_positive_number,
        "growth_interval": parse_count,
    },
    aliases={"bf16": "param=bf16", "fp16": "param=fp16"},
    spellings={"param=bf16": "bf16", "param=fp16": "fp16"},
    written={"param": "bfloat16"},
    implied={"reduce": "float32", "output": "float32"},
    check=_why_options_invalid,
    unsharded=lambda options: "",
    parallel="fsdp",
    checkpoint=CheckpointState(grad_scaler=_is_fp16),
    contract=(
        ContractTestArm("fsdp:bf16"),
        ContractTestArm("fsdp:bf16,reduce=bf16,keep_fp32=0"),
        ContractTestArm("fsdp:fp16", skips_steps=True),
    ),
)
