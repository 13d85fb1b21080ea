"""The CPU, and what it does with 16-bit formats."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from ampcompare.base.environment.versions import fingerprint
from ampcompare.doctor.finding import Check

__all__ = ["cpu_flags", "examine_processor", "usable_cores"]

CPUINFO = Path("/proc/cpuinfo")
SHOWN = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX512_BF16",
    "avx512_fp16": "AVX512_FP16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX_BF16",
    "amx_fp16": "AMX_FP16",
    "asimdhp": "NEON fp16",
    "bf16": "NEON bf16",
    "sve": "SVE",
}


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the abilities that the kernel lists; none where it lists nothing, as on macOS and Windows."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next(
        (
            frozenset(line.partition(":")[2].split())
            for line in lines
            if line.partition(":")[0].strip() in ("flags", "Features")
        ),
        frozenset(),
    )


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def examine_processor(facts: dict[str, Any] | None, flags: frozenset[str]) -> list[Check]:
    """Check the CPU and how it computes in fp16 and bf16.

    Args:
        facts: value of the probe `torch_build`; None where torch does not import.
        flags: from `cpu_flags`.
    """
    cores = usable_cores()
    abilities = [text for flag, text in SHOWN.items() if flag in flags]
    with_torch = f"; torch uses {facts['capability']}" if facts and facts["capability"] else ""
    findings = [
        Check(
            "CPU",
            "processor",
            f"{fingerprint()['processor']}, {cores} core{'s' * (cores > 1)} to use, {platform.machine()}",
            "ok",
            f"{', '.join(abilities) or 'no abilities listed'}{with_torch}",
            facts={"cores": cores, "abilities": abilities},
        )
    ]
    if facts is None:
        return findings
    findings.append(_products("fp16", facts["fp16_products"], "AVX512_FP16 or AMX_FP16", flags))
    findings.append(_products("bf16", facts["bf16_products"], "AVX-512 or AMX", flags))
    return findings


def _products(name: str, fast: bool | None, wanted: str, flags: frozenset[str]) -> Check:
    if fast:
        slow = name == "bf16" and flags and not flags & {"avx512_bf16", "amx_bf16", "bf16"}
        reason = "but without native instructions: emulated (--cpu-half)" if slow else ""
        if name == "fp16":
            reason = "but not for every backward pass: emulated by default (--cpu-half)"
        return Check("CPU", f"{name} on the cpu", "in oneDNN", "ok", reason, facts={"fast": not slow})
    if fast is None:
        return Check(
            "CPU", f"{name} on the cpu", "unknown", "note", "this torch cannot report it", facts={"fast": None}
        )
    if name == "fp16":
        reason = f"no {wanted}: ampcompare computes in fp32 and rounds once, 15 to 100 times as fast (--cpu-half)"
    else:
        reason = f"no {wanted}: ampcompare computes in fp32 and rounds once (--cpu-half)"
    return Check("CPU", f"{name} on the cpu", "by slow kernels", "note", reason, facts={"fast": False})
