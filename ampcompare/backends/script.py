"""The arm `script`: a user's training script exactly as it is written, recorded and untouched."""

from ampcompare.backends.explanation import ArmExplanation
from ampcompare.backends.spec import BackendSpec, InScript, Options


def _explain_arm(options: Options) -> ArmExplanation:
    return ArmExplanation(
        summary="a training script as it is written: recorded, and untouched",
        does=(
            ("weights", "those of the script"),
            ("casts", "the script's own, if it has any"),
            ("loss scale", "the script's own, if it has any"),
            ("optimizer", "as the script steps it"),
        ),
        twin=None,
        twin_is="python SCRIPT: equal to the last bit, with the same number of threads",
        differs=(),
        script=(),
    )


SPEC = BackendSpec(
    summary="your training script exactly as it is written, with its own precision: compare ... -- SCRIPT",
    implementation="ampcompare.training.precision.fp32:FP32",
    explain=_explain_arm,
    unsharded=lambda options: "it trains a script",
    elsewhere=lambda options: "it trains a script",
    in_script=InScript(
        behind="ampcompare.script.behind.script_arm:prepare_torch_amp_stand_in",
        is_as_written=True,
        keeps_apex=True,
    ),
    # No contract arms: it replaces nothing, and runs with a script only.
)
