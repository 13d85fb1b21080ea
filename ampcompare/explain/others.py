"""torch.amp, manual .half(), fp32 and backends of other packages in sentences."""

from __future__ import annotations

from ampcompare.arm import SHORT_DTYPES, Arm
from ampcompare.explain.levels import FIRST_SCALE, GROWTH_INTERVAL
from ampcompare.explain.parts import Parts
from ampcompare.explain.scripts import apex_script, fp32_script, half_script, native_script

TF32_SCRIPT = ("torch.backends.cuda.matmul.allow_tf32 = True", "torch.backends.cudnn.allow_tf32 = True")
HALF_GROWTH_INTERVAL = 1000  # of fp16_utils and DeepSpeed

__all__ = ["explain_fp32", "explain_half", "explain_native", "explain_other"]


def explain_fp32(arm: Arm) -> Parts:
    """Explain the reference, and its form in TF32."""
    tf32 = bool(arm.options.get("tf32"))
    return Parts(
        summary="fp32 with products and convolutions in TF32" if tf32 else "plain single precision: the reference",
        does=(
            ("weights", "fp32"),
            ("casts", "none"),
            ("batch norm", "fp32"),
            ("loss scale", "none needed"),
            ("optimizer", "steps the fp32 weights"),
            (
                "TF32",
                "10 bits of mantissa in matrix products and convolutions, in the whole process; on a GPU of capability "
                "8.0 or later only"
                if tf32
                else "on a GPU of capability 8.0 or later torch convolves in TF32 by default; see `ampcompare doctor`",
            ),
        ),
        twin="apex:O0",
        twin_is="near: O0 leaves TF32 as torch has it"
        if tf32
        else "equal to the last bit, where nothing of the model is fp64",
        differs=("O0 replaces model.forward to cast inputs to fp32, and adds hooks to state_dict()",),
        script=(*(TF32_SCRIPT if tf32 else ()), *fp32_script()),
        twin_script=apex_script({"opt_level": "O0"}),
    )


def explain_native(arm: Arm) -> Parts:
    """Explain a `native` arm, with what it overrides."""
    dtype = str(arm.options.get("dtype", "float16"))
    name = SHORT_DTYPES[dtype]
    is_fp16 = dtype == "float16"
    first = arm.options.get("init_scale", FIRST_SCALE)
    interval = arm.options.get("growth_interval", GROWTH_INTERVAL)
    backoff, growth = arm.options.get("backoff_factor", 0.5), arm.options.get("growth_factor", 2.0)
    dynamic = (
        f"dynamic: begins at {first:.0f}; at an overflow times {backoff:g} and the step skipped, times {growth:g} "
        f"after {interval} steps without one"
    )
    return Parts(
        summary=f"torch.autocast in {name}" + (" with torch.amp.GradScaler" if is_fp16 else ", without a loss scale"),
        does=(
            ("weights", "stay fp32"),
            (
                "casts",
                f"inside the `with`, by torch's lists for the device: products and convolutions to {name}, sensitive "
                "functions and losses to fp32, the rest as it comes. The lists for CPU and CUDA are not the same. "
                f"{name} copies of weights are kept until the `with` ends",
            ),
            ("inputs, outputs", f"as they come: a model that ends in a linear layer returns {name}"),
            ("batch norm", f"fp32 weights and statistics, {name} in and out on CUDA"),
            ("master weights", "none needed: the weights are fp32"),
            ("optimizer", "steps the fp32 weights"),
            (
                "loss scale",
                dynamic if is_fp16 else "none: bf16 has the range of fp32, with 8 bits of precision against 11",
            ),
            ("checkpoint", "scaler.state_dict() beside model and optimizer" if is_fp16 else "nothing to add"),
        ),
        twin="apex:O1" if is_fp16 else None,
        twin_is="what torch.amp was made from; see `ampcompare explain O1` for what differs"
        if is_fp16
        else "Apex knows no bf16; its nearest arm is apex:O1, in fp16 with a loss scale",
        differs=(),
        script=native_script(dtype, dict(arm.options)),
        twin_script=apex_script({"opt_level": "O1"}) if is_fp16 else (),
    )


def explain_half(arm: Arm) -> Parts:
    """Explain a `half` arm, with what it overrides."""
    dtype = str(arm.options.get("dtype", "float16"))
    name = SHORT_DTYPES[dtype]
    bn_fp32, masters = bool(arm.options.get("bn_fp32")), bool(arm.options.get("master_weights"))
    loss_scale = arm.options.get("loss_scale")
    twin = None
    if dtype == "float16":
        scale = (loss_scale or 1.0) if masters else loss_scale  # O2 would scale by itself
        options = {"opt_level": "O2" if masters else "O3", "loss_scale": scale}
        options["keep_batchnorm_fp32"] = bn_fp32 if masters else bn_fp32 or None
        twin = Arm.make("apex", **options)
    added = [*(["fp32 masters"] if masters else []), *(["a dynamic loss scale"] if loss_scale == "dynamic" else [])]
    return Parts(
        summary=f"the whole model in {name}, as scripts do it by hand"
        + (", batch norm in fp32" if bn_fp32 else "")
        + (f", with {' and '.join(added)} as fp16 optimizers have them" if added else ""),
        does=(
            ("weights", f"become {name}, all" + (" but those of batch norm" if bn_fp32 else "")),
            ("casts", "none inside the model: an operation runs in the type of what it is given"),
            ("inputs, outputs", f"floating inputs become {name}, outputs fp32, so losses outside are in fp32"),
            (
                "batch norm",
                f"fp32 weights and statistics, {name} in and out" if bn_fp32 else f"{name} weights and statistics",
            ),
            (
                "master weights",
                f"an fp32 copy of each {name} weight, in its place in the optimizer"
                if masters
                else "none: an update below half a unit in the last place of a weight is lost",
            ),
            ("optimizer", _half_optimizer(name, masters)),
            ("loss scale", _half_scale(arm, name)),
            ("checkpoint", f"model.state_dict() holds {name} weights" + (", masters are not in it" if masters else "")),
        ),
        twin=None if twin is None else str(twin),
        twin_is="the same numbers, through Apex"
        if twin and not added
        else "the same idea, through Apex"
        if twin
        else f"Apex knows no bf16; its nearest arm is apex:{'O2' if masters else 'O3'}, in fp16",
        differs=(),
        script=half_script(dtype, bn_fp32, loss_scale, master_weights=masters),
        twin_script=apex_script(dict(twin.options)) if twin else (),
    )


def _half_optimizer(name: str, masters: bool) -> str:
    if masters:
        return "steps the masters with widened gradients and fp32 state, then rounds them into the model"
    eps = "; Adam's eps of 1e-8 is 0 there" if name == "fp16" else ""
    return f"steps {name} weights with {name} gradients and state{eps}"


def _half_scale(arm: Arm, name: str) -> str:
    loss_scale = arm.options.get("loss_scale")
    if loss_scale is None:
        return "none: gradients below 2**-25 become 0" if name == "fp16" else "none"
    if loss_scale == "dynamic":
        first = arm.options.get("init_scale", FIRST_SCALE)
        interval = arm.options.get("growth_interval", HALF_GROWTH_INTERVAL)
        return (
            f"dynamic: begins at {first:.0f}; an overflow skips the step and halves it, down to 1; "
            f"{interval} steps without one double it"
        )
    return f"static at {loss_scale:g}: divided out once per step, an overflow is not looked for"


def explain_other(arm: Arm) -> Parts:
    """Explain the backend of another package, as far as anything is known of it."""
    return Parts(
        summary=f"the backend {arm.backend!r} of another package, of which nothing is known here",
        does=(),
        twin=None,
        twin_is="not known; what it does to a model is seen with --arch",
        differs=(),
        script=(),
        twin_script=(),
    )
