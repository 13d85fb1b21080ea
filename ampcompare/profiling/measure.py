"""One run of a loop under an arm, profiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch

from ampcompare.backends.arm import Arm
from ampcompare.precision.base import Precision
from ampcompare.precision.cpu_half import cpu_half
from ampcompare.precision.factory import make_precision
from ampcompare.profiling.build import build_profile
from ampcompare.profiling.kinds import SHORT
from ampcompare.profiling.peaks import peak_of
from ampcompare.profiling.profiled_precision import ProfiledPrecision
from ampcompare.profiling.step_profiler import Enough, Measured, StepProfiler, Steps
from ampcompare.records.profile import ArmProfile

__all__ = ["Loop", "measure_loop", "optimizer_name", "profile_of"]

Loop = Callable[[ProfiledPrecision], Any]


def measure_loop(
    loop: Loop, arm: Arm, steps: Steps, device: torch.device, *, half: str = "auto", seed: int = 0
) -> tuple[Measured, Precision, StepProfiler, str | None]:
    """Train a loop until all steps are made, and return what was measured.

    Args:
        half: how 16-bit types are computed on a CPU.

    Returns:
        What was measured, the precision that trained, the profiler, and how 16-bit types were computed.
    """
    torch.manual_seed(seed)
    precision = make_precision(arm, device=str(device))
    mode, arithmetic = cpu_half(half, precision.half_dtype, device)
    profiler = StepProfiler(steps, device)
    profiled = ProfiledPrecision(precision, profiler)
    try:
        beneath = profiler.beneath() if mode is not None and "emulated" in mode else nullcontext()
        with beneath, arithmetic, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with suppress(Enough):
                    loop(profiled)
            finally:
                profiler.close()
    finally:
        _release(precision)
    return profiler.measured, precision, profiler, mode


def profile_of(
    arm: Arm, measured: Measured, precision_half: torch.dtype | None, profiler: StepProfiler, mode: str | None,
    device: torch.device,
) -> ArmProfile:  # fmt: skip
    """Return the profile of an arm, with the peaks of the device."""
    half = "" if precision_half is None else SHORT.get(str(precision_half).removeprefix("torch."), "")
    tf32 = device.type == "cuda" and _has_tf32()
    profile = build_profile(
        str(arm),
        measured,
        device=device_name(device),
        half_dtype=half,
        half=mode or "",
        optimizer=", ".join(dict.fromkeys(map(optimizer_name, profiler.marks.optimizers))),
        tf32=tf32,
    )
    if profile.limits is None:
        return profile
    dtype = half or ("tf32" if tf32 else "fp32")
    peak = peak_of(device, dtype, emulated="emulated" in (mode or ""))
    limits = profile.limits.model_copy(
        update={"peak_flops": peak.flops, "peak_bytes": peak.bytes, "peak_dtype": dtype, "source": peak.source}
    )
    return profile.model_copy(update={"limits": limits})


def device_name(device: torch.device) -> str:
    """Return the device as reports name it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def optimizer_name(optimizer: Any) -> str:
    """Return the class of an optimizer and how it steps, as in "Adam (for-loop)"."""
    defaults = getattr(optimizer, "defaults", {})
    how = "fused" if defaults.get("fused") else "foreach" if defaults.get("foreach") else ""
    if not how and "foreach" in defaults:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        on_gpu = bool(params) and all(param.device.type in ("cuda", "xpu") for param in params)
        how = "foreach" if on_gpu and defaults.get("foreach") is None else "for-loop"
    return f"{type(optimizer).__name__}{f' ({how})' if how else ''}"


def _has_tf32() -> bool:
    return torch.cuda.get_device_capability()[0] >= 8 and bool(
        torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    )


def _release(precision: Precision) -> None:
    """Undo the patches of O1, so that the next run begins with torch as it is."""
    close = getattr(getattr(getattr(precision, "amp", None), "_amp_state", None), "close", None)
    if close is not None:
        close()
