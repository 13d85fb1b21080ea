"""Whether a user's script goes through the arms on the device: one for Apex, and what `migrate` makes of it."""

import shutil

from benchmarks.gpu import ROOT
from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Report, describe_runs

SCRIPT = ROOT / "examples" / "apex_digits" / "train.py"
METRIC = ("--metric", r"top1:max=Acc@1 ([\d.]+)")
ARMS = {
    "apex": ("fp32", "native:fp16", "native:bf16", "apex:O1", "apex:O2", "apex:O3", "half:bn_fp32"),
    "rewritten": ("script", "fp32", "native:fp16", "native:bf16", "apex:O1", "apex:O2"),
    "adapter": ("script", "fp32", "native:fp16", "apex:O1"),
}
MIGRATE = {"rewritten": ("--rewrite",), "adapter": ("--adapter",)}
REHEARSED = ("script", "fp32", "native:fp16", "apex:O1")


def run(context: Context, report: Report) -> None:
    """Migrate the example script in both ways, then compare arms on all versions of it."""
    folder = context.scratch / "scripts"
    seeds = ("0",) if context.rehearse else ("0", "1")
    seeded = ("--seeds", ",".join(seeds))
    epochs = ("--epochs", "1" if context.rehearse else "4", "--device", context.device)
    for version, arms in ARMS.items():
        # Each in a folder of its own: files next to each other are one project to `migrate`.
        script = folder / version / SCRIPT.name
        script.parent.mkdir(parents=True)
        shutil.copy(SCRIPT, script)
        if version in MIGRATE:
            done = context.ampcompare("migrate", *MIGRATE[version], "--write", str(script))
            code = script.read_text(encoding="utf-8").partition('"""\n')[2]
            report.check(
                f"{version}: nothing of it imports Apex", done.code == 0 and "apex" not in code, done.reason
            )
        used = [arm for arm in arms if not context.rehearse or arm in REHEARSED]
        where = ("-o", str(folder / f"{version}-runs"), "--device", context.device)
        output = ("--no-progress", "-q", "--json")
        words = ("compare", "--arm", ",".join(used), *seeded, *METRIC, *where, *output, "--", str(script))
        done = context.ampcompare(*words, *epochs)
        if "arms" not in (answer := done.document):
            report.check(version, False, done.reason)
            continue
        for row in answer["arms"]:
            seen = f"{describe_runs(row)}; {done.reason}"
            report.check(f"{version} with {row['arm']}", row["completed"] == len(seeds), seen)
        paired = any(text.startswith("Paired:") for text in answer["reading"])
        seen = "; ".join(answer["reading"])[:300]
        report.check(f"{version}: equal weights and batches in all arms", paired, seen)
        report.figures[version] = answer["arms"]
    report.says = (
        f"a script for Apex and both migrated versions went through {len(ARMS['apex'])} arms at most"
    )
