"""Whether every task trains on the device: each with the arms that people choose between, and what looks into a run."""

from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Report, describe_runs
from benchmarks.gpu.smoke import installed_runs

TASKS = ("lm", "segmentation", "detection", "gan", "regression")
ARMS = ("fp32", "native:fp16", "native:bf16", "apex:O1", "apex:O2", "half:bf16,masters=fp32")
REHEARSED = ("fp32", "apex:O1")
STEPS = 6
# Further ways to train, each with a task that it changes.
RUNS = {
    "lm, blocks recomputed in the backward pass": (
        "--task",
        "lm",
        "--arm",
        "native:bf16",
        "--checkpoint-activations",
    ),
    "lm, weights in shards": ("--task", "lm", "--arm", "fsdp:bf16"),
    "lm, fp8 products": ("--task", "lm", "--arm", "fp8:rowwise"),
}
ONLY_ON_GPUS = {
    "lm, compiled": ("--task", "lm", "--arm", "native:bf16", "--compile"),
    "segmentation by torchvision": (
        "--task",
        "segmentation",
        "--arm",
        "apex:O2",
        "--arch",
        "deeplabv3_resnet50",
    ),
    "detection by torchvision": (
        "--task",
        "detection",
        "--arm",
        "native:fp16",
        "--arch",
        "fcos_resnet50_fpn",
    ),
}
DIAGNOSED = (("--task", "lm", "--arm", "native:fp16"), ("--task", "segmentation", "--arm", "apex:O2"))


def run(context: Context, report: Report) -> None:
    """Compare arms on each task for some steps, train in further ways, diagnose two runs and find a largest batch."""
    few = ("--device", context.device, "--max-steps", str(STEPS), "--no-progress", "-q")
    arms = ",".join(REHEARSED if context.rehearse else ARMS)
    for task in TASKS:
        where = context.scratch / task
        words = ("compare", "--task", task, "--arm", arms, "--seeds", "0", *few, "--json", "-o", str(where))
        done = context.ampcompare(*words, most=150.0)
        if (rows := done.document.get("arms")) is None:
            report.check(task, False, done.reason)
            continue
        for row in rows:
            report.check(f"{task} with {row['arm']}", row["completed"] == 1, describe_runs(row))
        report.figures[task] = rows
    runs = installed_runs(context, report, RUNS if context.rehearse else {**RUNS, **ONLY_ON_GPUS})
    for number, (name, options) in enumerate(runs.items()):
        done = context.ampcompare("run", *options, *few, "-o", str(context.scratch / f"run-{number}"))
        report.check(name, done.code == 0, done.reason)
    if context.rehearse:
        report.leave_out(f"{', '.join(ONLY_ON_GPUS)} (need a GPU)")
    for options in DIAGNOSED[: 1 if context.rehearse else None]:
        done = context.ampcompare(
            "diagnose", *options, "--device", context.device, "--steps", "3", most=120.0
        )
        name = f"diagnose {' '.join(options)}"
        report.check(name, done.code == 0, done.reason)
        report.figures[name] = done.out.splitlines()[:1]
    report.says = f"{len(TASKS)} tasks with {arms}, {len(runs)} further runs and diagnose ran to their end"
