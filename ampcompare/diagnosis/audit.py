"""The types that operations really ran in, against what the arm promises."""

from __future__ import annotations

from collections import Counter, defaultdict

from ampcompare.backends.arm import Arm
from ampcompare.backends.options import DTYPE_NAMES
from ampcompare.diagnosis.observation import Observation
from ampcompare.records.diagnosis import Audit

__all__ = ["audit"]

PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution"))
# As torch dispatches the functions that O1 and autocast cast to fp32.
TO_FP32 = frozenset(
    (
        *("_softmax", "_log_softmax", "nll_loss_forward", "mse_loss", "exp", "log", "pow", "cosh", "sinh", "tan"),
        *("rsqrt", "reciprocal", "prod", "cumsum", "cumprod", "linalg_vector_norm"),
        *("native_layer_norm", "native_group_norm"),
    )
)
NORMS = frozenset(("native_layer_norm", "native_group_norm"))  # fp32 under O1 only: autocast on a CPU leaves them alone
MAX_NAMED = 6


def audit(arm: Arm, observation: Observation) -> list[Audit]:
    """Return a row for each operation and its types, those that differ from the promise first."""
    calls: Counter[tuple[str, tuple[str, ...], tuple[str, ...], str]] = Counter()
    modules: dict[tuple[str, tuple[str, ...], tuple[str, ...], str], list[str]] = defaultdict(list)
    for (name, inputs, outputs, module), count in observation.types.items():
        key = (name, inputs, outputs, _remark(arm, name, inputs, module))
        calls[key] += count
        if module not in modules[key]:
            modules[key].append(module)
    rows = [
        Audit(
            operation=name,
            inputs=list(inputs),
            outputs=list(outputs),
            calls=count,
            modules=modules[name, inputs, outputs, remark][:MAX_NAMED],
            remark=remark,
        )
        for (name, inputs, outputs, remark), count in calls.items()
    ]
    return sorted(rows, key=lambda row: (not row.remark, -row.calls, row.operation))


def _remark(arm: Arm, name: str, inputs: tuple[str, ...], module: str) -> str:
    half = _half_type(arm)
    if half is None or not module:
        return f"{arm} promises fp32" if half is None and {"fp16", "bf16"} & set(inputs) else ""
    if name in PRODUCTS and "fp32" in inputs and half not in inputs and not arm.options.get("keep_fp32"):
        return f"fp32 island: {arm} promises products in {half}"
    casts_functions = arm.backend == "native" or arm.options.get("opt_level") == "O1"
    if casts_functions and name in TO_FP32 and half in inputs and not (name in NORMS and arm.backend == "native"):
        return f"{half} island: {arm} promises this function in fp32"
    return ""


def _half_type(arm: Arm) -> str | None:
    """Return the 16-bit type that an arm promises, as it is shown."""
    if arm.backend == "fp32" or arm.options.get("opt_level") == "O0":
        return None
    return DTYPE_NAMES.get(str(arm.options.get("dtype", "float16")), "fp16")
