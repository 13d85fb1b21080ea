"""The backend `fp8`: products of linear layers in 8-bit floating point by torchao, over a bf16 arm.

Source: torchao 0.18, `torchao.float8`; tests compare its emulation with the formula.
"""

from collections.abc import Mapping
from dataclasses import replace

from ampcompare.backends.explanation import ArmExplanation
from ampcompare.backends.library import Library
from ampcompare.backends.options import make_choice_parser, mark_inner_arm_option, parse_count
from ampcompare.backends.over_bf16 import DEFAULT, inner_arm_text, inner_script_lines, why_not_inner_arm
from ampcompare.backends.spec import BackendSpec, ContractTestArm, Options

LIBRARY = Library(("torchao.float8",), ("torchao",), "pip install 'ampcompare[fp8]'", extra="fp8")
ALIGNMENT = 16  # of the sizes that `torch._scaled_mm` multiplies
CAPABILITY = {"tensorwise": "8.9", "rowwise": "9.0"}


def _conversion_lines(scaling: str, multiple: int) -> tuple[str, ...]:
    """Return how a script converts its model, before DDP."""
    return (
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training",
        f'config = Float8LinearConfig.from_recipe_name("{scaling}")',
        "fits = lambda module, name: type(module) is torch.nn.Linear and not any(",
        f"    size % {multiple} for size in module.weight.shape)",
        "model = convert_to_float8_training(model, config=config, module_filter_fn=fits)",
    )


def _arm_of_format_name(given: Mapping[str, str]) -> str:
    """Return the arm that `fp8:mxfp8` is a name of; it takes layers of any size."""
    if given.get("scaling", "").lower() != "mxfp8":
        return ""
    over = f",over={given['over']}" if "over" in given else ""
    return f"gemm:mxfp8{over}"


def _explain_arm(options: Options) -> ArmExplanation:
    scaling, inner = str(options["scaling"]), inner_arm_text(options)
    scales = {
        "rowwise": "one scale for each row or column, a power of two, from its largest element",
        "tensorwise": "one scale for each tensor, from its largest element",
    }
    multiple = int(options.get("align", ALIGNMENT))
    return ArmExplanation(
        summary=f"{inner}, with the products of linear layers in fp8, scaled {scaling}; "
        f"{LIBRARY.why_missing() or 'torchao is installed'}",
        does=(
            ("weights", f"those of {inner}: fp8 copies are made for each product and not kept"),
            (
                "products",
                "of nn.Linear, forward and backward: input, weight and gradient are rounded to fp8 and "
                "multiplied, and the result is bf16",
            ),
            (
                "types",
                "e4m3 for input and weight, e5m2 for the gradient"
                if scaling == "tensorwise"
                else "e4m3 for all",
            ),
            ("scaling", scales[scaling]),
            (
                "not converted",
                f"layers whose sizes are not multiples of {multiple}, such as a head of 10 classes; convolutions, "
                "embeddings, norms, and what attention modules of torch multiply by themselves. The record and "
                "`explain --arch` name them; a model in which nothing is converted is refused",
            ),
            ("loss scale", "none: each tensor has its own scales"),
            ("checkpoint", f"that of {inner}"),
            (
                "on a GPU",
                f"in hardware from compute capability {CAPABILITY[scaling]}; below it is emulated",
            ),
            ("on a CPU", "emulated: operands are rounded to fp8, and multiplied in fp32"),
        ),
        twin=inner,
        twin_is="the arm underneath, with bf16 products",
        differs=(
            "the operands of products have 3 bits of fraction, or 2, instead of 7",
            "time, on a GPU with fp8",
        ),
        script=(*_conversion_lines(scaling, multiple), *inner_script_lines(inner)),
    )


SPEC = BackendSpec(
    summary="fp8 products of linear layers by torchao, tensorwise or rowwise, over a bf16 arm",
    implementation="ampcompare.training.precision.fp8:FP8",
    explain=_explain_arm,
    parsers={
        "scaling": make_choice_parser("tensorwise", "rowwise", "mxfp8"),
        "over": mark_inner_arm_option,
        "align": parse_count,
    },
    stands_for=_arm_of_format_name,
    positional="scaling",
    default="tensorwise",
    implied={"over": DEFAULT, "align": ALIGNMENT},
    check=lambda options: why_not_inner_arm(inner_arm_text(options)),
    library=LIBRARY,
    inner=inner_arm_text,
    wraps=lambda options, inner: replace(inner, products="fp8"),
    contract=(
        ContractTestArm("fp8:tensorwise,align=1"),
        ContractTestArm("fp8:rowwise,align=1"),
        ContractTestArm("fp8:rowwise,align=1,over=half:bf16"),
    ),
)
