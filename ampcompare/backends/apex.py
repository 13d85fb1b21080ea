"""The backend `apex`: `apex.amp` at an opt level, from the real Apex or from ampcompare's own engine.

Source: Apex 25.05, `apex/amp`; `docs/deviations.md` for where our engine departs from it.
"""

from ampcompare.backends.apex_levels import (
    FIRST_SCALE,
    GROWTH_INTERVAL,
    LEVELS,
    OTHERWISE_IN_AUTOCAST,
    ROCM_LEVELS,
    OptLevel,
    level_with_overrides,
)
from ampcompare.backends.explanation import (
    ArmExplanation,
    apex_script_lines,
    explanation_rows_of_roles,
)
from ampcompare.backends.options import (
    DTYPE_NAMES,
    float_dtype,
    make_choice_parser,
    parse_flag,
    parse_loss_scale,
    parse_module_patterns,
    parse_positive_number,
    roles_with_types,
)
from ampcompare.backends.roles import BATCH_NORM, LossScale, Roles
from ampcompare.backends.spec import BackendSpec, CheckpointState, ContractTestArm, InScript, Options

O4_DIFFERS = (
    "O4 patches torch for the life of the process, evaluation included; autocast casts inside its `with`"
)
NOT_COMPARED = (
    "the options of this level and the resulting types follow ROCm's Apex; its numbers were never recorded, and "
    "nothing here was compared with it"
)


def _roles_for_options(options: Options) -> Roles:
    level = level_with_overrides(options)
    scale: LossScale | None = None
    if not level.is_static:
        low, high = level.min_loss_scale, level.max_loss_scale
        scale = LossScale(min(FIRST_SCALE, high), GROWTH_INTERVAL, lowest=low, highest=high)
    elif level.loss_scale != 1.0:
        scale = LossScale(float(level.loss_scale))
    base = Roles(
        weights=level.half_name if level.is_half else "fp32",
        products=level.half_name if level.patch_torch_functions else "",
        lists="O1" if level.patch_torch_functions else "",
        masters="fp32" if level.is_half and level.master_weights else "",
        loss_scale=scale,
        kept=(BATCH_NORM,) if level.is_half and level.keep_batchnorm_fp32 else (),
    )
    return roles_with_types(base, options)


def _explain_arm(options: Options) -> ArmExplanation:
    level = level_with_overrides(options)
    name = str(options.get("opt_level", "O1"))
    keep = str(options.get("keep_fp32", ""))
    twin, twin_is = _torch_amp_equivalent_and_closeness(name, level)
    if keep:
        twin += f"{',' if ':' in twin else ':'}keep_fp32={keep}"
    return ArmExplanation(
        summary=_level_summary_text(level),
        does=explanation_rows_of_roles(
            _roles_for_options(options),
            casts=_function_cast_rows_of_level(level),
            borders=_level_border_text(level),
        ),
        twin=twin,
        twin_is=twin_is,
        differs=_differences_from_equivalent(level, twin),
        script=apex_script_lines({"opt_level": name, **options}),
    )


def _level_summary_text(level: OptLevel) -> str:
    if level.patch_torch_functions:
        return "fp32 weights; every torch function casts its inputs to the type that suits it"
    if not level.is_half:
        return "everything in fp32, through Apex's code"
    norm = ", fp32 batch norm" if level.keep_batchnorm_fp32 else ""
    masters = " and fp32 master weights" if level.master_weights else ", with no fp32 copy"
    article = "an fp16" if level.half_name == "fp16" else "a bf16"
    return f"{article} model{norm}{masters}"


def _function_cast_rows_of_level(level: OptLevel) -> tuple[tuple[str, str], ...]:
    if not level.patch_torch_functions:
        return ()
    half = level.half_name
    return (
        (
            f"cast to {half}",
            "convolutions (conv1d, conv2d, conv3d, ...), matrix products (linear, matmul, mm, ...), activations "
            f"(prelu); {half} copies of weights are kept until scale_loss ends",
        ),
        (
            "cast to fp32",
            "softmax and the like (softmax, log_softmax, softmin, ...), norms (layer_norm, group_norm, "
            "local_response_norm, ...), resampling (interpolate, grid_sample), losses (cross_entropy, nll_loss, "
            "mse_loss, ...), functions (exp, expm1, log, ...), reductions (sum, prod, cumsum, ...), moves (cpu)",
        ),
        ("to the widest", f"arithmetic, comparisons, joins: {half} and fp32 inputs give fp32"),
        (
            "not cast",
            f"all else, such as batch norm, pooling, relu and dropout; F.binary_cross_entropy raises on {half}",
        ),
    )


def _level_border_text(level: OptLevel) -> str:
    outputs = DTYPE_NAMES.get(level.cast_model_outputs or "", level.cast_model_outputs)
    if level.cast_model_type is None:
        if outputs:
            return f"inputs are unchanged; outputs of the model become {outputs}"
        return f"unchanged: a model that ends in a linear layer returns {level.half_name}; its loss is cast to fp32"
    kind = level.half_name if level.is_half else "fp32"
    outside = "" if outputs else ", so a loss outside is in fp32"
    return f"floating inputs of model.forward become {kind}, its outputs {outputs or 'fp32'}{outside}"


def _torch_amp_equivalent_and_closeness(name: str, level: OptLevel) -> tuple[str, str]:
    if level.half_name == "bf16":
        return (
            ("native:bf16", "the same idea, function by function")
            if level.patch_torch_functions
            else _half_equivalent_and_closeness(level)
        )
    if level.patch_torch_functions:
        scale = f",init_scale={level.loss_scale:g}" if level.is_static else ""
        return f"native:fp16{scale}", "the same idea, function by function; the model for torch.amp"
    if not level.is_half:
        if name == "O1":
            return "native:fp16", "close: this arm only scales the loss"
        return "fp32", "equal to the last bit, unless part of the model is fp64"
    if level.master_weights:
        return "native:fp16", "the nearest: torch.amp has no fp16 model with master weights"
    return _half_equivalent_and_closeness(level)


def _half_equivalent_and_closeness(level: OptLevel) -> tuple[str, str]:
    words = ["bf16"] if level.half_name == "bf16" else []
    words += ["bn_fp32"] if level.keep_batchnorm_fp32 else []
    words += ["masters=fp32"] if level.master_weights else []
    words += [] if level.is_static else ["dynamic"]
    if isinstance(level.loss_scale, float) and level.loss_scale != 1:
        words.append(f"loss_scale={level.loss_scale:g}")
    return "half" + (f":{','.join(words)}" if words else ""), "the same numbers, without Apex"


def _differences_from_equivalent(level: OptLevel, twin: str) -> tuple[str, ...]:
    if twin == "fp32":
        return (
            "amp.initialize replaces model.forward to cast inputs to fp32, and adds hooks to state_dict()",
            "fp64 weights become fp32",
        )
    if twin.startswith("half"):
        differences = [
            "amp.initialize casts inputs and outputs; manually, call .half() and one of .float()",
            "Apex divides the gradients by a static scale after each backward pass, .half() once per step",
        ]
        if level.half_name == "bf16":
            differences.insert(0, NOT_COMPARED)
        if not level.is_static:
            differences.append(
                "Apex's dynamic scale doubles after 2000 good steps, up to a ceiling; that of half after 1000"
            )
        return tuple(differences)
    scaling = (
        "Apex checks and moves the scale at every backward pass, GradScaler at every update()",
        "at an overflow Apex skips all optimizers of that backward pass, GradScaler only those that overflowed; "
        "several losses share one GradScaler, where Apex can give each its own (num_losses)",
        f"its scale stops at {level.max_loss_scale:.0f} and may have a floor (min_loss_scale), GradScaler has neither",
        "gradients are unscaled when scale_loss ends; with GradScaler call scaler.unscale_(optimizer) before clipping",
        "in a checkpoint, loss_scale and unskipped of amp.state_dict() are scale and _growth_tracker of GradScaler's",
    )
    if level.patch_torch_functions:
        if level.half_name == "bf16":
            return (O4_DIFFERS, NOT_COMPARED)
        lists = "; ".join(
            f"{name}: {o1} under O1, {other} there" for name, o1, other in OTHERWISE_IN_AUTOCAST
        )
        return (
            "O1 patches torch for the life of the process, evaluation included; autocast casts inside its `with`",
            f"the lists are not quite those of autocast on CUDA: {lists}",
            *scaling,
        )
    if not level.is_half:
        return ("nothing is cast here; autocast runs products in fp16", *scaling)
    return (
        "here all weights are fp16 and rounded once; there they stay fp32 and are rounded again for each product",
        "here softmax, layer norm and other sensitive functions inside the model run in fp16; autocast gives them fp32",
        "here the optimizer trains fp32 masters: clip amp.master_params(optimizer), not model.parameters()",
        *scaling,
    )


def _parse_opt_level(text: str) -> str:
    if text.upper() in LEVELS:
        return text.upper()
    if text[:1] == "0" and f"O{text[1:]}" in LEVELS:
        raise ValueError(f"an opt level begins with the letter O, not with a zero: write O{text[1:]}")
    raise ValueError(f"expected one of {', '.join(LEVELS)}")


def _why_options_invalid(options: Options) -> str:
    if options.get("opt_level") in ROCM_LEVELS and options.get("engine") == "nvidia":
        return f"{options['opt_level']} is a level of ROCm's Apex, which NVIDIA's does not have; use engine=compat"
    low, high = options.get("min_loss_scale"), options.get("max_loss_scale")
    if low is not None and high is not None and low > high:
        return f"min_loss_scale={low:g} is above max_loss_scale={high:g}"
    if "keep_fp32" in options and options.get("opt_level") == "O0":
        return "O0 already keeps every module in fp32; leave keep_fp32 out"
    level = level_with_overrides(options)
    if not level.is_half and level.master_weights:
        return f"the weights are fp32 under {options['opt_level']}, so masters=fp32 changes nothing; leave it out"
    if not level.is_half and level.keep_batchnorm_fp32:
        return f"batch norm is fp32 under {options['opt_level']}, so keep_batchnorm_fp32 changes nothing; leave it out"
    if level.is_static and (low or high):
        bound = "min_loss_scale" if low else "max_loss_scale"
        return f"{bound} belongs to a dynamic loss scale; add loss_scale=dynamic, or leave it out"
    return ""


SPEC = BackendSpec(
    elsewhere=lambda options: "Apex, and the engine that reproduces it, support CPU and CUDA tensors only",
    unsharded=lambda options: (
        "Apex keeps masters and fp16 gradients in whole tensors; fsdp is the successor of O2"
    ),
    summary="apex.amp at an opt level: O0 to O3, and O4 and O5 of ROCm's Apex, in bf16",
    implementation="ampcompare.training.precision.apex:make_apex",
    explain=_explain_arm,
    roles=_roles_for_options,
    parsers={
        "opt_level": _parse_opt_level,
        "loss_scale": parse_loss_scale,
        "keep_batchnorm_fp32": parse_flag,
        "master_weights": parse_flag,
        "cast_model_outputs": float_dtype,
        "min_loss_scale": parse_positive_number,
        "max_loss_scale": parse_positive_number,
        "keep_fp32": parse_module_patterns,
        "engine": make_choice_parser("auto", "nvidia", "compat"),
    },
    positional="opt_level",
    default="O1",
    aliases={"masters=fp32": "master_weights=true", "masters=none": "master_weights=false"},
    shorthands={level.lower(): f"apex:{level}" for level in LEVELS},
    implied={"engine": "auto"},
    check=_why_options_invalid,
    calls_apex=True,
    checkpoint=CheckpointState(opt_level=lambda options: str(options.get("opt_level", "O1"))),
    in_script=InScript(
        behind="ampcompare.script.behind.apex_levels:prepare_torch_amp_stand_in", keeps_apex=True
    ),
    contract=(
        ContractTestArm("apex:O0,engine=compat"),
        ContractTestArm("apex:O1,engine=compat", skips_steps=True),
        ContractTestArm("apex:O1,loss_scale=128,engine=compat"),
        ContractTestArm("apex:O1,keep_fp32=0,engine=compat", skips_steps=True),
        ContractTestArm("apex:O2,engine=compat", skips_steps=True),
        ContractTestArm("apex:O2,loss_scale=128,engine=compat"),
        ContractTestArm("apex:O2,keep_fp32=Linear,engine=compat", skips_steps=True),
        ContractTestArm("apex:O3,engine=compat"),
        ContractTestArm("apex:O3,keep_fp32=0|1,engine=compat"),
        ContractTestArm("apex:O3,loss_scale=dynamic,engine=compat", skips_steps=True),
        ContractTestArm("apex:O4,engine=compat"),
        ContractTestArm("apex:O5,engine=compat"),
        ContractTestArm("apex:O5,loss_scale=dynamic,keep_fp32=2,engine=compat", skips_steps=True),
    ),
)
