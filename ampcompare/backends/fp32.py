"""The backend `fp32`: plain single precision, the usual reference, and TF32 on GPUs that have it."""

from ampcompare.backends.explanation import PLAIN_STEP, ArmExplanation, explanation_rows_of_roles
from ampcompare.backends.options import parse_flag
from ampcompare.backends.roles import Roles
from ampcompare.backends.spec import BackendSpec, ContractTestArm, InScript, Options

TF32_SCRIPT = (
    'torch.backends.cuda.matmul.fp32_precision = "tf32"  # before torch 2.9: allow_tf32 = True',
    'torch.backends.cudnn.conv.fp32_precision = "tf32"  # before torch 2.9: torch.backends.cudnn.allow_tf32 = True',
)


def _roles_for_options(options: Options) -> Roles:
    return Roles(products="tf32" if options.get("tf32") else "")


def _explain_arm(options: Options) -> ArmExplanation:
    if options.get("tf32"):
        summary = "fp32 with products and convolutions in TF32"
        tf32 = (
            "10 bits of mantissa in matrix products and convolutions, in the whole process; on a GPU of capability 8.0 "
            "or later only"
        )
        twin_is = "close: O0 keeps torch's TF32 setting"
        script: tuple[str, ...] = (*TF32_SCRIPT, *PLAIN_STEP)
    else:
        summary = "plain single precision: the reference"
        tf32 = (
            "on a GPU of capability 8.0 or later torch convolves in TF32 by default; see `ampcompare doctor`"
        )
        twin_is = "equal to the last bit, unless part of the model is fp64"
        script = PLAIN_STEP
    return ArmExplanation(
        summary=summary,
        does=(
            *explanation_rows_of_roles(_roles_for_options(options), casts=[("casts", "none")]),
            ("TF32", tf32),
        ),
        twin="apex:O0",
        twin_is=twin_is,
        differs=("O0 replaces model.forward to cast inputs to fp32, and adds hooks to state_dict()",),
        script=script,
    )


SPEC = BackendSpec(
    summary="plain single precision: the reference; optionally TF32 on a GPU that has it",
    implementation="ampcompare.training.precision.fp32:FP32",
    explain=_explain_arm,
    roles=_roles_for_options,
    parsers={"tf32": parse_flag},
    shorthands={"float32": "fp32", "32-true": "fp32", "no": "fp32"},
    implied={"tf32": False},
    unsharded=lambda options: "",
    elsewhere=lambda options: "TF32 exists on NVIDIA GPUs only" if options.get("tf32") else "",
    in_script=InScript(acts_if_off=True),
    contract=(ContractTestArm("fp32"),),
)
