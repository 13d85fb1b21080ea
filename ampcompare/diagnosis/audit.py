"""The types that operations really ran in, against what `ampcompare explain` promises for the arm."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from fnmatch import fnmatchcase

import torch

from ampcompare.backends.apex_casts import OTHERWISE_IN_AUTOCAST
from ampcompare.backends.apex_levels import apex_level
from ampcompare.backends.arm import Arm
from ampcompare.backends.options import DTYPE_NAMES
from ampcompare.diagnosis.observation import Observation
from ampcompare.diagnosis.promises import in_fp32, in_half
from ampcompare.diagnosis.watch import Called
from ampcompare.records.diagnosis import Audit

__all__ = ["audit"]

MAX_NAMED = 6


def audit(arm: Arm, observation: Observation) -> list[Audit]:
    """Return a row for each operation and its types, those that differ from the promise first."""
    remark_on = _remarks(arm, observation)
    calls: Counter[tuple[str, tuple[str, ...], tuple[str, ...], str]] = Counter()
    modules: dict[tuple[str, tuple[str, ...], tuple[str, ...], str], list[str]] = defaultdict(list)
    for called, count in observation.types.items():
        key = (called.operation, called.inputs, called.outputs, remark_on(called))
        calls[key] += count
        if called.module not in modules[key]:
            modules[key].append(called.module)
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


def _remarks(arm: Arm, observation: Observation) -> Callable[[Called], str]:
    """Return what says how a call differs from the promises of an arm; "" if it does not.

    Only the forward pass of modules is compared: what a loss function or the backward pass runs in follows from it.
    """
    is_fp8 = arm.backend == "fp8"
    effective = arm.effective(observation.device_type)
    if effective is not None and effective.arm is not None:
        arm = Arm.parse(effective.arm)
    half = _half_type(arm)
    if half is None:
        return lambda called: f"{arm} promises fp32" if {"fp16", "bf16"} & set(called.inputs) else ""
    device = observation.device_type
    casts = arm.backend == "native" or arm.options.get("opt_level") in ("O1", "O4")
    autocast = {"fp16": torch.float16, "bf16": torch.bfloat16}[half] if arm.backend == "native" else None
    wide = in_fp32(device, autocast) if casts else {}
    narrow = {} if is_fp8 else in_half(device)  # fp8 converts some of the products, which a CPU emulates in fp32
    patterns = list(filter(None, str(arm.options.get("keep_fp32", "")).split("|")))
    by_type = any(not any(_is_in(name, [one]) for name in observation.modules) for one in patterns)
    norms_in_fp32 = arm.backend == "apex" and bool(apex_level(arm.options).keep_batchnorm_fp32)

    def remark(called: Called) -> str:
        name, inputs = called.operation, called.inputs
        if called.phase != "forward" or not called.module:
            return ""
        kept = _is_in(called.module, patterns)
        if name in narrow and "fp32" in inputs and half not in inputs and not kept and not by_type:
            return f"fp32 island: {f'explain promises {narrow[name]} in {half}' if casts else f'the model is {half}'}"
        if name in narrow and half in inputs and kept:
            return f"{half} island: keep_fp32 promises this module in fp32"
        if name in wide and half in inputs:
            return f"{half} island: explain promises {wide[name]} in fp32{_unless(wide[name], autocast is None)}"
        if norms_in_fp32 and "batch_norm" in name and "fp32" not in inputs:
            return f"{half} batch norm: explain promises fp32 weights and statistics, unless affine=False"
        return ""

    return remark


def _unless(function: str, is_o1: bool) -> str:
    """Return the forms of a function that O1 leaves alone, as `explain` lists them."""
    forms = (names for names, in_o1, _ in OTHERWISE_IN_AUTOCAST if in_o1 == "as their input" and function in names)
    return "".join(f", all but {names}" for names in forms if is_o1)


def _is_in(module: str, patterns: list[str]) -> bool:
    """Return whether a module, or one around it, has a name that matches a pattern."""
    name = module.rpartition(":")[2]
    parts = name.split(".")
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return any(fnmatchcase(one, pattern) for one in names for pattern in patterns)


def _half_type(arm: Arm) -> str | None:
    """Return the 16-bit type that an arm promises, as it is shown."""
    if arm.backend == "fp32" or arm.options.get("opt_level") == "O0":
        return None
    if arm.options.get("opt_level") in ("O4", "O5"):
        return "bf16"
    return DTYPE_NAMES.get(str(arm.options.get("dtype", "float16")), "fp16")
