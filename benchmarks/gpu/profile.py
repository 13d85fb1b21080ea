"""Whether a profile accounts for a step on the device: parts add up, memory adds up, reasons and traces are written."""

from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Report

MAX_STEP = 0.03  # by which the parts may differ from the step
MAX_MEMORY = 0.05  # of the peak that may be without a name
PROFILED = {
    "convnet": ("--arch", "convnet", "--data", "synthetic", "--batch-size", "256"),
    "transformer": ("--task", "lm", "--batch-size", "64"),
}
REHEARSED = {"mlp": ("--arch", "mlp", "--data", "synthetic", "--train-size", "256", "--batch-size", "64")}
ARMS = "fp32,native:fp16,native:bf16,apex:O1,apex:O2"


def run(context: Context, report: Report) -> None:
    """Profile recipes under the arms, and check each account."""
    arms = "fp32,apex:O2" if context.rehearse else ARMS
    steps = ("--steps", "4", "--profiled-steps", "2", *(("--no-trials",) if context.rehearse else ()))
    for name, words in (REHEARSED if context.rehearse else PROFILED).items():
        where = context.scratch / name
        options = ("--device", context.device, "--arm", arms, *steps, "--json", "-o", str(where))
        done = context.ampcompare("profile", *words, *options, most=240.0)
        if "arms" not in (found := done.document):
            report.check(name, False, done.reason)
            continue
        for arm in found["arms"]:
            title = f"{name} under {arm['arm']}"
            report.check(f"{title} has a profile", not arm["failure"], arm["failure"])
            if arm["failure"]:
                continue
            off = abs(sum(part["seconds"] for part in arm["parts"]) / arm["seconds"] - 1)
            report.check(f"{title}: parts add up", off <= MAX_STEP, f"off by {100 * off:.2f} %")
            memory = arm["memory"]
            rest = abs(memory["rest_bytes"]) / memory["measured_bytes"]
            report.check(f"{title}: memory adds up", rest <= MAX_MEMORY, f"{100 * rest:.1f} % without a name")
        traced = (where / "trace.json").exists()
        report.check(f"{name} has a trace", traced)
        report.figures[name] = found
    report.says = f"steps and memory of {arms} add up"
