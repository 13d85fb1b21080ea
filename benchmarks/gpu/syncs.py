"""Host synchronizations, launches and bytes of one step, for each loop in a process of its own.

Checked is how often the host waits: what the arm itself needs, and not more. The rest are figures.
"""

import importlib
from pathlib import Path
from typing import Any

from benchmarks.gpu.context import Context, is_missing
from benchmarks.gpu.device import make_device
from benchmarks.gpu.loops import build
from benchmarks.gpu.report import Report

WARM_UP = 3
# How often the host may wait in a step. A dynamic loss scale with a stock optimizer needs one wait: it decides on the
# host whether the step is applied; with a fused optimizer, or one that skips on the device, the device decides.
SYNCS: dict[str, int] = {
    "bare fp32": 0,
    "bare native:fp16": 1,
    "bare native:fp16, fused": 0,
    "arm fp32": 0,
    "arm fp32, fused": 0,
    "arm fp32, ema": 0,
    "arm native:fp16": 1,
    "arm native:fp16, fused": 0,
    "arm native:fp16, skip": 0,
    "arm native:bf16": 0,
    "arm half": 0,
    "arm half:bn_fp32": 0,
    "arm half:bf16": 0,
    "arm half:loss_scale=128": 0,
    "arm half:dynamic": 1,
    "arm half:dynamic, skip": 0,
    "arm half:masters=fp32,dynamic": 1,
    "arm half:masters=fp32,dynamic, skip": 0,
    "arm apex:O0": 0,
    "arm apex:O1": 1,
    "arm apex:O1, fused": 0,
    "arm apex:O1, skip": 0,
    "arm apex:O2": 1,
    "arm apex:O2, fused": 0,
    "arm apex:O2, skip": 0,
    "arm apex:O2, ema": 1,
    "arm apex:O2,loss_scale=128": 0,
    "arm apex:O3": 0,
    "arm accelerate:fp16": 1,
    "arm accelerate:bf16": 0,
    "arm fabric:16-mixed": 1,
    "arm fabric:bf16-mixed": 0,
    "peer accelerate:fp16": 1,
    "peer fabric:16-mixed": 1,
    "peer timm": 1,
}
# Figures only: the real Apex has the waits that it has, and a drained block reads its losses and scales at its end.
FIGURES = ("apex O1", "apex O2", "arm fp32, drained", "arm apex:O2, drained", "arm native:fp16, drained")
REHEARSED = (
    *("bare fp32", "bare native:fp16", "arm fp32"),
    *("arm native:fp16, fused", "arm half:dynamic", "arm apex:O1"),
    *("arm native:fp16, skip", "arm half:dynamic, skip", "arm apex:O2, skip"),
    *("arm apex:O2", "arm apex:O2, fused", "arm apex:O2, drained", "arm accelerate:fp16", "apex O2"),
)


def run(context: Context, report: Report) -> None:
    """Count each loop, and hold its waits against the table."""
    names = [name for name in (*SYNCS, *FIGURES) if not context.rehearse or name in REHEARSED]
    model = "tiny" if context.rehearse else "resnet50"
    figures: dict[str, Any] = {}
    for name, counts in zip(
        names, context.at_once(lambda name: _try_count(context, name, model), names), strict=True
    ):
        if isinstance(counts, str):
            if is_missing(counts):
                report.leave_out(f"{name} ({counts})")
            else:
                report.check(f"{name} runs", False, counts)
            continue
        figures[name] = counts
        if name in SYNCS:
            waits = counts["syncs"]
            report.check(f"{name}: at most {SYNCS[name]} syncs a step", waits <= SYNCS[name], f"{waits:g}")
    report.figures |= {"model": model, "per_step": figures}
    counted = sum(name in SYNCS for name in figures)
    report.says = f"no host sync of {counted} loops beyond what each needs, on {model}"


def _try_count(context: Context, name: str, model: str) -> dict[str, float] | str:
    try:
        return context.in_child(count, name, model, context.device, context.rehearse, context.apex_src)  # type: ignore[no-any-return]
    except RuntimeError as error:
        return str(error)


def count(name: str, model: str, device: str, small: bool, apex_src: Path | None) -> dict[str, float]:
    """Build a loop in this process, and return what one step of it does."""
    if device == "cpu":
        # A CPU is served like a device that makes the host wait.
        for module in ("ampcompare.apex.amp._engine.device_skip", "ampcompare.training.precision.half"):
            importlib.import_module(module)._DEVICE_TYPES = frozenset({"cpu", "cuda"})
    loop = build(name, model, device, small=small, apex_src=apex_src, batch=0 if small else 16)
    for _ in range(WARM_UP):
        loop.step()
    return {what: value / loop.steps for what, value in make_device(device).counts(loop.step).items()}
