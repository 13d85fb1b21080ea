"""Whether a user's script goes through the arms on the device: one for Apex, and what `migrate` makes of it."""

import shutil

from benchmarks.gpu import ROOT
from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Report, describe_runs

SCRIPT = ROOT / "examples" / "apex_digits" / "train.py"
METRIC = ("--metric", r"top1:max=Acc@1 ([\d.]+)")
ARMS = {
    "apex.py": ("fp32", "native:fp16", "native:bf16", "apex:O1", "apex:O2", "apex:O3", "half:bn_fp32"),
    "native.py": ("script", "fp32", "native:fp16", "native:bf16", "apex:O1", "apex:O2"),
}
REHEARSED = ("script", "fp32", "native:fp16", "apex:O1")


def run(context: Context, report: Report) -> None:
    """Migrate the example script, then compare arms on both versions."""
    folder = context.scratch / "scripts"
    folder.mkdir()
    for name in ARMS:
        shutil.copy(SCRIPT, folder / name)
    done = context.ampcompare("migrate", "--rewrite", "--write", str(folder / "native.py"))
    migrated = "apex" not in (folder / "native.py").read_text(encoding="utf-8").partition('"""\n')[2]
    report.check("migrate leaves no Apex", done.code == 0 and migrated, done.reason)
    seeds = ("0",) if context.rehearse else ("0", "1")
    seeded = ("--seeds", ",".join(seeds))
    epochs = ("--epochs", "1" if context.rehearse else "4", "--device", context.device)
    for name, arms in ARMS.items():
        used = [arm for arm in arms if not context.rehearse or arm in REHEARSED]
        where = (
            "-o",
            str(folder / f"{name}-runs"),
            "--device",
            context.device,
            "--no-progress",
            "-q",
            "--json",
        )
        words = ("compare", "--arm", ",".join(used), *seeded, *METRIC, *where, "--", str(folder / name))
        done = context.ampcompare(*words, *epochs)
        if "arms" not in (answer := done.document):
            report.check(name, False, done.reason)
            continue
        for row in answer["arms"]:
            seen = f"{describe_runs(row)}; {done.reason}"
            report.check(f"{name} with {row['arm']}", row["completed"] == len(seeds), seen)
        paired = any(text.startswith("Paired:") for text in answer["reading"])
        report.check(
            f"{name}: equal weights and batches in all arms", paired, "; ".join(answer["reading"])[:300]
        )
        report.figures[name] = answer["arms"]
    report.says = (
        f"a script for Apex and its migrated version went through {len(ARMS['apex.py'])} arms at most"
    )
