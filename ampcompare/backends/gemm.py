"""The backend `gemm`: each product of linear layers in a format of 8 or 4 bits, emulated, over a bf16 arm.

Sources of the recipes: OCP Microscaling Formats 1.0, arXiv 2509.25149 (NVFP4), TransformerEngine's `common/recipe`,
torchao 0.18 `float8` and `prototype/mx_formats`.
"""

from collections.abc import Collection
from dataclasses import replace

from ampcompare.backends.explanation import ArmExplanation
from ampcompare.backends.library import Library
from ampcompare.backends.options import (
    make_choice_parser,
    mark_inner_arm_option,
    parse_flag,
    parse_module_patterns,
)
from ampcompare.backends.over_bf16 import DEFAULT, inner_arm_text, inner_script_lines, why_not_inner_arm
from ampcompare.backends.roles import ProductFormat, Roles
from ampcompare.backends.spec import BackendSpec, ContractTestArm, InScript, Options
from ampcompare.base.formats import FORMATS

TORCHAO = Library(
    ("torchao.prototype.mx_formats.mx_tensor",), ("torchao",), "pip install 'ampcompare[fp8]'", extra="fp8"
)
PRODUCTS = ("fprop", "dgrad", "wgrad")
SHORT = {name.removeprefix("fp8_"): name for name in FORMATS} | {"fp8": "fp8_tensorwise"}
GRADIENTS = ("dgrad", "wgrad")
LAST = "last"  # the linear layer of a model that runs last
NOT_ROUNDED = ("bf16", "bfloat16")


def parse_format_name(text: str) -> str:
    """Return the name of a format of `FORMATS`, or "bf16"."""
    word = text.lower().replace("-", "_")
    if word in NOT_ROUNDED:
        return "bf16"
    name = SHORT.get(word, word)
    if name not in FORMATS:
        raise ValueError(f"expected one of bf16, {', '.join(FORMATS)}")
    return name


def _parse_patterns(text: str) -> str:
    return text if text in (LAST, "none") else parse_module_patterns(text)


def formats_of_products(options: Options) -> dict[str, ProductFormat]:
    """Return the format of each product: what it sums is written next to it in `PRODUCTS`."""
    found = {}
    for role in PRODUCTS:
        name = str(options.get(role) or options["format"])
        switches = [
            switch
            for switch, _, roles in _switches_known_to_format(name)
            if options.get(switch) and role in roles
        ]
        if name == "bf16":
            found[role] = ProductFormat("bf16")
            continue
        form = FORMATS[name]
        scale = str(options["scale"]) if options.get("scale") in form.scales else form.scales[0]
        gradients = str(options.get("grads_as", form.gradients.name)) if form.element.largest > 6 else "e2m1"
        if role in GRADIENTS and gradients != form.element.name:
            switches.append(f"grads_as={gradients}")
        found[role] = ProductFormat(name, scale, tuple(switches))
    return found


def _switches_known_to_format(name: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return (option, what it needs, products that it changes) of the switches that a format knows."""
    if name == "bf16":
        return []
    known: list[tuple[str, str, tuple[str, ...]]] = [
        ("sr", "dgrad or wgrad in a format", GRADIENTS),
        ("rht", "wgrad in a format", ("wgrad",)),
    ]
    if FORMATS[name].tiles is None:
        known.append(("tiles", "fprop or dgrad in mxfp8, mxfp4 or nvfp4", ("fprop", "dgrad")))
    return known


NEEDS = {name: needs for name, needs, _ in _switches_known_to_format("mxfp8")}


def _why_options_invalid(options: Options) -> str:
    if wrong := why_not_inner_arm(inner_arm_text(options)):
        return wrong
    formats = formats_of_products(options)
    names = {role: form.format for role, form in formats.items()}
    for switch, needs in NEEDS.items():
        if options.get(switch) and not any(switch in form.switches for form in formats.values()):
            return f"{switch} changes nothing here: it needs {needs}"
    scale, grads_as = options.get("scale"), options.get("grads_as")
    used = sorted({name for name in names.values() if name != "bf16"})
    if scale and not any(scale in FORMATS[name].scales for name in used):
        known = "; ".join(f"{name} has {', '.join(FORMATS[name].scales)}" for name in used) or "bf16 has none"
        return f"scale={scale} is not a way to make a scale of these formats: {known}"
    wide = [role for role in GRADIENTS if names[role] != "bf16" and FORMATS[names[role]].element.largest > 6]
    if grads_as and not wide:
        return f"grads_as={grads_as} changes nothing here: it needs dgrad or wgrad in a format of 8 bits"
    for role in PRODUCTS:
        if role in options and options[role] == options["format"]:
            return f"{role}={options[role]} is what {options['format']} means already; leave it out"
    return _why_not_torchao(options, names.values()) if options.get("engine") == "torchao" else ""


def _why_not_torchao(options: Options, names: Collection[str]) -> str:
    """Return why torchao cannot multiply in formats, by their names; "" if it can."""
    others = sorted({name for name in names if name != "mxfp8"})
    switches = [name for name in (*NEEDS, "grads_as") if options.get(name)]
    if not others and not switches:
        return ""
    return (
        f"engine=torchao multiplies in mxfp8 alone, without switches, not in {', '.join(others + switches)}; "
        "leave these out, or engine"
    )


def _roles_over_inner_arm(options: Options, inner: Roles) -> Roles:
    formats = formats_of_products(options)
    return replace(inner, fprop=formats["fprop"], dgrad=formats["dgrad"], wgrad=formats["wgrad"])


SHARED = {
    "tensor": "one scale for each tensor",
    "row": "one scale for each row of an operand",
    "block": "one scale for each {block} numbers",
}
SCALES = {
    "fp32": "largest of the element / largest number, in fp32",
    "pow2": "that quotient, rounded down to a power of two",
    "rceil": "the smallest power of two that cuts nothing off (TransformerEngine)",
    "floor": "a power of two from the exponent of the largest number, which may cut it off (OCP MX 1.0)",
    "even": "as floor, of the largest number rounded to the bits of the element (torchao)",
    "te": "e4m3 for each block, and one in fp32 for the tensor (TransformerEngine)",
    "torchao": "as te, without block scales below 2^-6 (torchao)",
}
SUMS = {
    "fprop": "y = x w', over input features",
    "dgrad": "dx = dy w, over output features",
    "wgrad": "dw = dy' x",
}
SWITCHES = {
    "sr": "gradients rounded at random, with the mean kept",
    "rht": "both operands times a 16 x 16 Hadamard matrix, rounded to bf16",
    "tiles": "weights share scales in squares, so that fprop and dgrad multiply the same numbers",
}


def _product_text(role: str, form: ProductFormat) -> str:
    if form.format == "bf16":
        return f"{SUMS[role]}: bf16"
    known = FORMATS[form.format]
    words = [SWITCHES.get(switch, switch.replace("grads_as=", "gradients in ")) for switch in form.switches]
    if known.tiles and role != "wgrad":
        words.append("weights in squares")
    shared = SHARED[known.shares].format(block=known.block)
    return "; ".join([f"{SUMS[role]}: {known.element.name}, {shared}: {SCALES[form.scale]}", *words])


def _explain_arm(options: Options) -> ArmExplanation:
    inner, keep = inner_arm_text(options), str(options.get("keep", LAST))
    kept = {LAST: "the linear layer of a model that runs last: the row names it", "none": "none"}
    formats = [
        str(options["format"]),
        *(f"{role} in {options[role]}" for role in PRODUCTS if role in options),
    ]
    engine: list[tuple[str, str]] = []
    if options.get("engine") == "torchao":
        engine = [
            (
                "engine",
                f"torchao, {TORCHAO.why_missing() or 'which is installed'}: its kernel, or its emulation",
            )
        ]
    return ArmExplanation(
        summary=f"{inner}, with the products of linear layers in {', '.join(formats)}; emulated",
        does=(
            ("weights", f"those of {inner}: a product rounds its operands, both from bf16, and keeps none"),
            *((role, _product_text(role, form)) for role, form in formats_of_products(options).items()),
            ("result", "summed in fp32, rounded once to bf16; the bias is added in bf16"),
            (
                "in bf16",
                f"{kept.get(keep, keep)}; convolutions, embeddings, norms, and what attention multiplies",
            ),
            ("loss scale", "none: each tensor or block has its own scales"),
            (
                "checkpoint",
                f"that of {inner}" + (", and how often was rounded at random" if options.get("sr") else ""),
            ),
            *engine,
            (
                "time",
                "that of an emulation, which is no measure: on a CPU 1.3 to 1.9 times that of native:bf16",
            ),
        ),
        twin=inner,
        twin_is="the arm underneath, with bf16 products",
        differs=("the operands of products have 1 to 3 bits of fraction instead of 7",),
        script=("# numbers only: no plain torch multiplies in these formats", *inner_script_lines(inner)),
    )


SPEC = BackendSpec(
    summary="products of linear layers in mxfp8, mxfp4, nvfp4 or fp8, each on its own, emulated over a bf16 arm",
    implementation="ampcompare.training.precision.gemm:Gemm",
    explain=_explain_arm,
    parsers={
        "format": parse_format_name,
        **dict.fromkeys(PRODUCTS, parse_format_name),
        "scale": make_choice_parser(
            *dict.fromkeys(scale for form in FORMATS.values() for scale in form.scales)
        ),
        "sr": parse_flag,
        "rht": parse_flag,
        "tiles": parse_flag,
        "grads_as": make_choice_parser("e4m3", "e5m2"),
        "keep": _parse_patterns,
        "over": mark_inner_arm_option,
        "engine": make_choice_parser("emulation", "torchao"),
    },
    positional="format",
    default="mxfp8",
    implied={
        "over": DEFAULT,
        "keep": LAST,
        "engine": "emulation",
        **dict.fromkeys(("sr", "rht", "tiles"), False),
    },
    check=_why_options_invalid,
    inner=inner_arm_text,
    wraps=_roles_over_inner_arm,
    in_script=InScript(),  # that of the arm underneath: `ScriptLinearFormats` only changes its products
    contract=(
        ContractTestArm("gemm:mxfp8,keep=none"),
        ContractTestArm("gemm:fp8_rowwise"),
        ContractTestArm("gemm:mxfp8,wgrad=bf16,keep=none,over=half:bf16"),
    ),
)
