"""The backend `actnn`: activations saved for the backward pass in few bits, over another arm."""

from ampcompare.backends.explanation import ArmExplanation
from ampcompare.backends.options import mark_inner_arm_option
from ampcompare.backends.spec import BackendSpec, ContractTestArm, Options


def _parse_bits(text: str) -> int:
    if text not in ("2", "4", "8"):
        raise ValueError("expected 2, 4 or 8")
    return int(text)


def _parse_group_size(text: str) -> int:
    number = int(text)
    if number < 8 or number % 4:
        raise ValueError("expected a multiple of 4 of at least 8")
    return number


def _inner_arm_text(options: Options) -> str:
    return str(options.get("over", "fp32")).replace("+", ",")


def _explain_arm(options: Options) -> ArmExplanation:
    bits, group = int(options["bits"]), int(options.get("group", 256))
    over = _inner_arm_text(options)
    each = bits + 64 / group
    return ArmExplanation(
        summary=f"{over}, with what autograd saves of the model's forward pass in {bits} bits (ActNN's idea)",
        does=(
            ("weights, casts", f"those of {over}"),
            (
                "saved tensors",
                f"in groups of {group}: {bits} bits a value, rounded stochastically so that the mean is preserved, "
                f"and two fp32 numbers per group; {each:.3g} bits a value in all, against 32",
            ),
            ("left alone", "weights, integers, tensors below 1024 elements, and what the loss saves"),
            ("gradients", "unbiased, with noise from the rounding"),
            ("time", "more: packing and unpacking; docs/backends.md has figures"),
        ),
        twin=over,
        twin_is="the arm underneath, whose activations are saved as they are",
        differs=("memory of saved activations, time, and the noise of the gradients",),
        script=(),
    )


SPEC = BackendSpec(
    summary="activations saved for the backward pass in 2, 4 or 8 bits, over another arm",
    implementation="ampcompare.training.precision.actnn:ActNN",
    explain=_explain_arm,
    parsers={"bits": _parse_bits, "group": _parse_group_size, "over": mark_inner_arm_option},
    written={"bits": 2},
    implied={"group": 256, "over": "fp32"},
    inner=_inner_arm_text,
    contract=(
        ContractTestArm("actnn:bits=8"),
        ContractTestArm("actnn:bits=2,over=native:fp16", skips_steps=True),
        ContractTestArm("actnn:bits=4,over=apex:O2+engine=compat", skips_steps=True),
    ),
)
