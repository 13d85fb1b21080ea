"""Switches that change numbers or times that no line of the script shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampcompare.doctor.finding import Check, Verdict

__all__ = ["VARIABLES", "examine_numerics"]

# Variable: gravest verdict that it deserves when set, and what it does.
VARIABLES: dict[str, tuple[Verdict, str]] = {
    "NVIDIA_TF32_OVERRIDE": (
        "warning",
        "overrides every TF32 switch of torch: 0 turns TF32 off and 1 on, and fp32 arms change speed by 2 to 5 times",
    ),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (
        "warning",
        "turns TF32 on (1) or off (0) for fp32 matrix products, whatever the script says",
    ),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("warning", "lets oneDNN compute fp32 products on the CPU in bf16, f16 or tf32"),
    "DNNL_DEFAULT_FPMATH_MODE": ("warning", "lets oneDNN compute fp32 products on the CPU in bf16, f16 or tf32"),
    "ONEDNN_MAX_CPU_ISA": ("warning", "hides instructions of the CPU from oneDNN: other times, other rounding"),
    "ATEN_CPU_CAPABILITY": ("warning", "hides instructions of the CPU from torch: other times, other rounding"),
    "MKL_CBWR": ("note", "fixes MKL's code path: reproducible, slower"),
    "CUDA_LAUNCH_BLOCKING": ("warning", "waits after every kernel: step times are invalid"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("warning", "switches torch's memory cache off: times and peaks mean nothing"),
    "PYTORCH_CUDA_ALLOC_CONF": ("note", "changes torch's memory cache: peaks compare only with the same setting"),
    "PYTORCH_ALLOC_CONF": ("note", "changes torch's memory cache: peaks compare only with the same setting"),
    "CUDA_VISIBLE_DEVICES": ("note", "hides GPUs and renumbers the rest"),
    "CUBLAS_WORKSPACE_CONFIG": ("note", "fixes cuBLAS's workspace: reproducible, perhaps slower"),
    "TORCHDYNAMO_DISABLE": ("note", "switches torch.compile off"),
    "AMPCOMPARE_APEX_STRICT": ("note", "brings the defects of Apex back into engine=compat"),
}
ON_CUDA_ONLY = ("NVIDIA_", "TORCH_ALLOW_TF32_CUBLAS_", "CUDA_", "CUBLAS_", "PYTORCH_CUDA_", "PYTORCH_NO_CUDA_")
SWITCHES = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCHDYNAMO_DISABLE", "AMPCOMPARE_APEX_STRICT")


def examine_numerics(facts: dict[str, Any] | None, environment: Mapping[str, str]) -> list[Check]:
    """Check torch's TF32 switches, and each variable that is set and changes numbers or times silently.

    Args:
        facts: value of the probe `torch_build`; None where torch does not import.
        environment: variables by name.
    """
    findings = []
    if facts is not None:
        findings.append(_tf32(facts))
    on_cpu = facts is not None and facts["cuda"] is None
    for name, (verdict, effect) in VARIABLES.items():
        value = environment.get(name)
        if value is None or (name in SWITCHES and value in ("", "0")):
            continue
        if on_cpu and name.startswith(ON_CUDA_ONLY):
            findings.append(Check("Numerics", name, value, "note", f"on CUDA it {effect}", (f"unset {name}",)))
        else:
            findings.append(Check("Numerics", name, value, verdict, f"it {effect}", (f"unset {name}",)))
    if all(finding.name == "tf32" for finding in findings):
        findings.append(
            Check("Numerics", "variables", "none set", "ok", f"of the {len(VARIABLES)} that affect results or times")
        )
    return findings


def _tf32(facts: dict[str, Any]) -> Check:
    products, convolutions = facts["tf32_products"], facts["tf32_convolutions"]
    values = {"products": products, "convolutions": convolutions}
    value = f"matrix products {_switch(products)}, convolutions {_switch(convolutions)}"
    if facts["cuda"] is None:
        return Check("Numerics", "tf32", value, "ok", "of no effect without CUDA", facts=values)
    if products == convolutions:
        return Check("Numerics", "tf32", value, "ok", "", facts=values)
    reason = (
        "torch's default: on a GPU of capability 8.0 or later fp32 arms convolve in TF32 (10 bits of mantissa, as "
        "fp16) and multiply in fp32, so a speed-up over fp32 depends on this switch"
    )
    return Check(
        "Numerics",
        "tf32",
        value,
        "note",
        reason,
        ("export NVIDIA_TF32_OVERRIDE=0  # strict fp32 in all arms",),
        values,
    )


def _switch(value: bool | None) -> str:
    return "unknown" if value is None else "on" if value else "off"
