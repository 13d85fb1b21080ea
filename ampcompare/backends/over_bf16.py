"""The bf16 arm under one that changes products alone, as `fp8` and `gemm` do: its text, and what it can be."""

from ampcompare.backends.explanation import half_script_lines, native_script_lines
from ampcompare.backends.spec import Options

DEFAULT = "native:bf16"


def inner_arm_text(options: Options) -> str:
    """Return the text of the arm underneath, from the option `over`."""
    return str(options.get("over", DEFAULT)).replace("+", ",")


def why_not_inner_arm(inner: str) -> str:
    """Return why an arm cannot be the one underneath; "" if it can."""
    backend = inner.partition(":")[0]
    if backend not in ("native", "half") or "bf16" not in inner:
        return f"over={inner} is not a bf16 arm of native or half; give over=native:bf16 or over=half:bf16"
    return ""


def inner_script_lines(inner: str) -> tuple[str, ...]:
    """Return lines of a script: the step of the arm underneath."""
    if inner.startswith("native"):
        return native_script_lines("bfloat16", {})
    return half_script_lines("bfloat16", "bn_fp32" in inner, None, master_weights="master" in inner)
