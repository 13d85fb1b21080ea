"""Comparisons as users make them: eight arms on images of CIFAR's size, and the claims of published articles on a GPU.

Checked is that every run ends well; what the verdicts are is in the figures, and the pages lie next to them.
"""

import shutil

from benchmarks.gpu import ROOT
from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Report, describe_runs

ARMS = "fp32,native:fp16,native:bf16,apex:O1,apex:O2,apex:O3,half:bn_fp32,half:bf16"
CLAIMS = ROOT / "examples" / "claims" / "gpu.yaml"
COMPARED = {
    "eight-arms": (
        "--arm",
        ARMS,
        "--arch",
        "resnet18",
        "--data",
        "synthetic",
        "--epochs",
        "2",
        "--batch-size",
        "128",
    ),
    "claims": ("--config", str(CLAIMS)),
}
# In the place of these in a rehearsal, or, for a file, over it.
REHEARSED = (
    "--arm",
    "fp32,native:fp16",
    "--arch",
    "mlp",
    "--epochs",
    "1",
    "--train-size",
    "64",
    "--val-size",
    "32",
)


def run(context: Context, report: Report) -> None:
    """Make each comparison with three seeds, and keep its page, its table and its rows."""
    seeds = 1 if context.rehearse else 3
    counted = 0
    for name, options in COMPARED.items():
        where = context.scratch / name
        if context.rehearse:
            options = (*options, *REHEARSED) if "--config" in options else REHEARSED
        words = ("--device", context.device, "--seeds", f"0-{seeds - 1}", "--no-progress", "-q", "--json")
        done = context.ampcompare("compare", *options, *words, "-o", str(where))
        if "arms" not in (found := done.document):
            report.check(name, False, done.reason)
            continue
        counted += len(found["arms"])
        report.figures[name] = {"arms": found["arms"], "conclusions": found["reading"]}
        for row in found["arms"]:
            held = row["failed"] == 0 and row["completed"] > 0
            report.check(f"{name} with {row['arm']}", held, describe_runs(row))
        for kind in ("html", "md"):
            page = where / f"report.{kind}"
            report.check(f"{name} has {page.name}", page.is_file())
            if page.is_file() and report.folder is not None:
                shutil.copy(page, report.folder / f"{name}.{kind}")
    report.says = f"{counted} arms of {len(COMPARED)} comparisons trained with {seeds} seeds each"
