"""Read the values of an arm's options from text, and what those for types mean in every backend.

Each reader raises `ValueError` with what it expected.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace

from ampcompare.backends.roles import Roles
from ampcompare.backends.spec import Options
from ampcompare.base.environment.variables import FALSE_WORDS, TRUE_WORDS
from ampcompare.base.tensors.type_names import NAME_BY_TORCH_NAME

DTYPES = {
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
FULL = dict.fromkeys(("float32", "fp32", "float"), "float32")
WHOLE = re.compile("[0-9]{1,99}")
PATTERN = re.compile(r"[\w.*?\[\]!-]+")
# Those of options: a third party may spell other values in its own way.
DTYPE_NAMES = {name: NAME_BY_TORCH_NAME[name] for name in ("float16", "bfloat16", "float32")}


def make_choice_parser(*allowed: str) -> Callable[[str], str]:
    """Return a reader that accepts only the words in `allowed`, which are in lower case, in any case."""

    def parse_choice(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return text.lower()

    return parse_choice


def _make_dtype_parser(expected: str, names: dict[str, str]) -> Callable[[str], str]:
    def parse_dtype(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"expected {expected}")
        return names[text.lower()]

    return parse_dtype


half_dtype = _make_dtype_parser("float16 (fp16) or bfloat16 (bf16)", DTYPES)
float_dtype = _make_dtype_parser("float32 (fp32), float16 (fp16) or bfloat16 (bf16)", {**FULL, **DTYPES})
full_dtype = _make_dtype_parser("fp32", FULL)
fp32_or_none = _make_dtype_parser("fp32 or none", {**FULL, "none": "none"})


def parse_flag(text: str) -> bool:
    """Return a Boolean; yes, on and 1 count as true."""
    lowered = text.lower()
    if lowered in TRUE_WORDS:
        return True
    if lowered in FALSE_WORDS:
        return False
    raise ValueError("expected true or false")


def parse_positive_number(text: str) -> float:
    """Return a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise ValueError("expected a finite number above 0")
    return number


def parse_number_above_one(text: str) -> float:
    """Return a finite number above 1."""
    if (number := parse_positive_number(text)) <= 1:
        raise ValueError("expected a number above 1")
    return number


def parse_number_between_zero_and_one(text: str) -> float:
    """Return a number between 0 and 1."""
    if (number := parse_positive_number(text)) >= 1:
        raise ValueError("expected a number between 0 and 1")
    return number


def parse_count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not WHOLE.fullmatch(text) or (number := int(text)) < 1:
        raise ValueError("expected a whole number of at least 1")
    return number


def parse_loss_scale(text: str) -> float | str:
    """Return "dynamic" or a finite number above 0."""
    if text.lower() == "dynamic":
        return "dynamic"
    try:
        return parse_positive_number(text)
    except ValueError:
        raise ValueError("expected dynamic or a finite number above 0") from None


def parse_module_patterns(text: str) -> str:
    """Return patterns of module names or types, joined by `|`, each once and in order."""
    patterns = sorted({word.strip() for word in text.split("|")})
    if not all(PATTERN.fullmatch(pattern) for pattern in patterns):
        raise ValueError(
            "expected names or types of modules with *, ? and [], joined by |, such as *.norm|lm_head"
        )
    return "|".join(patterns)


def mark_inner_arm_option(text: str) -> str:
    """Mark an option whose value is an arm with its options joined by `+`; `Arm` reads it instead of this function."""
    return text


def roles_with_types(base: Roles, options: Options) -> Roles:
    """Return `base`, which has weights, products, masters and loss scale, with what the options for types set.

    `state`, `grads`, `reduce`, `rounding`, `kahan` and `keep_fp32` mean the same in each backend.
    """
    types = {
        name: DTYPE_NAMES[str(options[name])] for name in ("state", "grads", "reduce") if name in options
    }
    update = "kahan" if options.get("kahan") else str(options.get("rounding", "nearest"))
    patterns = tuple(filter(None, str(options.get("keep_fp32", "")).split("|")))
    on_copies = base.masters or "state" in types or update != "nearest"
    return replace(
        base,
        gradients=types.get("grads", base.weights),
        step="fp32" if on_copies else base.weights,
        state=types.get("state", "fp32" if base.masters else base.weights),
        reduction=types.get("reduce", base.weights),
        update=update,
        kept=(*base.kept, *patterns),
        asks_state="state" in types,
    )


def why_types_conflict(roles: Roles, options: Options) -> str:
    """Return which of the options for types change nothing, or exclude each other; "" if none do."""
    given = [name for name in ("masters", "grads", "rounding", "kahan") if options.get(name)]
    if roles.weights == "fp32" and given:
        value = options[given[0]]
        written = given[0] if value is True else f"{given[0]}={DTYPE_NAMES.get(value, value)}"
        return f"the weights are fp32, so {written} changes nothing; add weights=bf16, or leave it out"
    if "grads" in given and not roles.masters:
        return "grads=fp32 accumulates gradients in those of the masters; add masters=fp32"
    for name in ("rounding", "kahan"):
        if name in given and roles.masters:
            return (
                f"{name} keeps updates that 16-bit weights lose, but masters lose none; leave one of them out"
            )
    if "rounding" in given and "kahan" in given:
        return "rounding=stochastic and kahan both keep small updates; leave one of them out"
    if roles.update == "stochastic" and roles.weights != "bf16":
        return "rounding=stochastic is for bf16; write half:bf16,rounding=stochastic"
    return ""
