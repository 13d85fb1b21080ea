"""Time of a step: each arm against the bare loop of its number format, other libraries and the real Apex, in turns.

A ratio is taken within a round and its median is judged against a goal, widened by what two copies of the same bare
loop differ (the A/A row). A rehearsal judges no times: on a busy CPU they say nothing.
"""

import statistics
from typing import Any

from benchmarks.gpu.context import Context, is_missing
from benchmarks.gpu.report import Report
from benchmarks.gpu.turns import ratio, take_turns

FP32, FP16, BF16, HALF = "bare fp32", "bare native:fp16", "bare native:bf16", "bare half"
FUSED = "bare native:fp16, fused"
AA, AA16, AA_FUSED = f"{FP32} again", f"{FP16} again", f"{FUSED} again"
# Loops that take turns with each other, each by the bare loop of its number format. All of a group hold their memory at
# the same time, about 60 GB for the largest.
GROUPS = {
    "main": {
        FP32: FP32,
        AA: FP32,
        FP16: FP16,
        AA16: FP16,
        BF16: BF16,
        HALF: HALF,
        "arm fp32": FP32,
        "arm native:fp16": FP16,
        "arm native:bf16": BF16,
        "arm half": HALF,
        "arm apex:O1": FP16,
        "arm apex:O2": FP16,
    },
    "graph": {
        FUSED: FUSED,
        AA_FUSED: FUSED,
        "arm native:fp16, fused": FUSED,
        "arm apex:O1, fused": FUSED,
        "arm apex:O2, fused": FUSED,
        "arm native:fp16, fused, graph": FUSED,
        "arm apex:O1, fused, graph": FUSED,
        "arm apex:O2, fused, graph": FUSED,
    },
    "others": {
        FP16: FP16,
        AA16: FP16,
        "arm apex:O1": FP16,
        "arm apex:O2": FP16,
        "apex O1": FP16,
        "apex O2": FP16,
        "peer timm": FP16,
        "peer accelerate:fp16": FP16,
        "arm accelerate:fp16": FP16,
        "peer fabric:16-mixed": FP16,
        "arm fabric:16-mixed": FP16,
    },
    "engine": {
        FP32: FP32,
        AA: FP32,
        "arm apex:O0": FP32,
        HALF: HALF,
        "arm apex:O3": HALF,
        FP16: FP16,
        AA16: FP16,
        "arm native:fp16, skip": FP16,
        "arm apex:O2, skip": FP16,
        "arm apex:O2, drained": FP16,
    },
}
# The most telling first; those for which no time is left are left out.
TURNS = (
    *(
        ("resnet50", "main"),
        ("tiny", "main"),
        ("tiny", "graph"),
        ("transformer", "main"),
        ("resnet50", "others"),
    ),
    *(
        ("resnet50", "graph"),
        ("tiny", "engine"),
        ("resnet18", "main"),
        ("resnet50", "engine"),
        ("tiny", "others"),
    ),
    ("transformer", "others"),
)
# What an arm may cost at most, as a share of the loop it is divided by, and on a network that is host work alone. Arms
# of libraries are held against the loop that the library's documentation shows, ours of Apex against the real one.
GOALS = (
    ("arm fp32", FP32, 1.00, 1.05),
    ("arm apex:O0", FP32, 1.00, 1.05),
    ("arm native:fp16", FP16, 1.00, 1.05),
    ("arm native:bf16", BF16, 1.00, 1.05),
    ("arm half", HALF, 1.00, 1.05),
    ("arm apex:O3", HALF, 1.00, 1.05),
    ("arm apex:O1", FP16, 1.00, 0.90),
    ("arm apex:O2", FP16, 1.00, 0.90),
    ("arm accelerate:fp16", "peer accelerate:fp16", 1.01, 1.05),
    ("arm fabric:16-mixed", "peer fabric:16-mixed", 1.01, 1.05),
    ("arm apex:O1", "apex O1", 1.00, 1.00),
    ("arm apex:O2", "apex O2", 1.00, 1.00),
    ("arm apex:O1, fused, graph", "arm apex:O1, fused", 1.00, 0.50),
    ("arm apex:O2, fused, graph", "arm apex:O2, fused", 1.00, 0.50),
)
REHEARSED = (
    *(FP32, AA, FP16, AA16, "arm apex:O2", "arm apex:O2, skip"),
    *("peer timm", "peer accelerate:fp16", "arm accelerate:fp16", "apex O2"),
)
SECONDS = 14.0  # of turns for each group and model
SECONDS_TO_START = 3.0  # of a loop, which is built, warmed up and traced
BLOCK = 0.1


def run(context: Context, report: Report) -> None:
    """Measure each model, judge the goals, and keep every time in the figures."""
    judged = 0
    spent = {"seconds": 0.1, "block": 0.001} if context.rehearse else {"seconds": SECONDS, "block": BLOCK}
    for model, group in TURNS:
        bases = GROUPS[group]
        if context.rehearse and (model not in ("tiny", "resnet18") or group == "graph"):
            continue
        if not context.rehearse and context.seconds_left() < SECONDS + SECONDS_TO_START * len(bases):
            report.leave_out(f"{model}, {group} (no time left)")
            continue
        names = [name for name in bases if not context.rehearse or name in REHEARSED]
        names = [name for name in names if not (name.startswith("apex ") and context.apex_src is None)]
        times, facts, missing = take_turns(context, names, model, **spent)
        for name, why in missing.items():
            if is_missing(why):
                report.leave_out(f"{model}: {name} ({why})")
            else:
                report.check(f"{model}: {name} runs", False, why)
        copies = [name for name in names if name.endswith(" again")]
        report.check(f"{model}: a bare loop was timed twice", set(copies) <= set(times), ", ".join(times))
        report.figures.setdefault(model, {})[group] = _figures(times, facts, bases)
        if not context.rehearse:
            judged += _judge(report, model, times)
    if context.apex_src is None:
        report.leave_out("not compared with genuine Apex (no --apex-src)")
    report.says = f"{judged} goals for the time of a step met"
    if context.rehearse:
        report.leave_out("times (a rehearsal judges none)")
        report.says = "every loop took its turns"


def _judge(report: Report, model: str, times: dict[str, list[float]]) -> int:
    """Hold the ratios against the goals, and return how many there were."""
    copies = [(name, name.removesuffix(" again")) for name in times if name.endswith(" again")]
    spread = max((abs(ratio(times, *pair) - 1) for pair in copies if pair[1] in times), default=0.0)
    count = 0
    for name, base, most, most_of_host in GOALS:
        if name in times and base in times:
            count += 1
            found = ratio(times, name, base)
            goal = (most_of_host if model == "tiny" else most) + spread
            report.check(f"{model}: {name} by {base}: at most {goal:.3f}", found <= goal, f"{found:.3f}")
    return count


def _figures(times: dict[str, list[float]], facts: dict[str, Any], bases: dict[str, str]) -> dict[str, Any]:
    """Return by loop: median seconds, all of them, the ratio to its bare loop, and what the profiler saw in a step."""
    return {
        name: {
            "median_seconds": statistics.median(seconds),
            "bare": bases[name],
            "by_bare": ratio(times, name, bases[name]) if bases[name] in times else None,
            "tensor_core_share": facts[name]["product_share"],
            "traced": facts[name],
            "seconds": seconds,
        }
        for name, seconds in times.items()
    }
