"""Whether a stopped run goes on to the same bits: every arm, the generators of the device, and NCCL on one rank."""

import json
from pathlib import Path

from benchmarks.gpu.context import Context, Done
from benchmarks.gpu.report import Report
from benchmarks.gpu.smoke import ARMS, FUSED, installed_runs

SMALL = (
    "--batch-size",
    "16",
    "--train-size",
    "64",
    "--val-size",
    "32",
    "--epochs",
    "2",
    "--no-progress",
    "-q",
)
# Dropout draws from the generator of the device at each step; prefetch and the average are states of their own.
FURTHER = {
    "fp32 with dropout": ("--arm", "fp32", "--arch", "benchmarks.gpu.networks:dropout"),
    "apex:O1 with dropout": ("--arm", "apex:O1", "--arch", "benchmarks.gpu.networks:dropout"),
    "apex:O2 with an average and prefetch": ("--arm", "apex:O2", "--ema-decay", "0.9", "--prefetch", "2"),
    "apex:O2 with adam": ("--arm", "apex:O2", "--optimizer", "adam"),
    "apex:O2 with a fused optimizer": ("--arm", "apex:O2", *FUSED),
    "fp8:rowwise with a language model": ("--arm", "fp8:rowwise", "--task", "lm"),
}
RANKS = {
    "fp32": ("--parallel", "ddp"),
    "apex:O2": ("--parallel", "apex-ddp", "--sync-bn", "apex"),
    "native:fp16": ("--parallel", "ddp"),
}
REHEARSED = (
    *("apex:O1", "native:fp16", "fp32 with dropout", "apex:O2 with an average and prefetch"),
    "apex:O2 with a fused optimizer",
)


def run(context: Context, report: Report) -> None:
    """Verify each arm by itself, several at a time, and then in a group of one rank."""
    calls = installed_runs(context, report, {arm: ("--arm", arm) for arm in ARMS} | FURTHER)
    ranks = RANKS
    if context.rehearse:
        calls = {name: calls[name] for name in REHEARSED}
        ranks = {arm: options for arm, options in RANKS.items() if arm == "apex:O2"}

    def verify(name: str) -> Done:
        where = context.scratch / str(list(calls).index(name))
        words = ("--verify-resume", "--deterministic", "--device", context.device)
        return context.ampcompare("run", *calls[name], *words, *SMALL, "-o", str(where), most=200.0)

    names = list(calls)
    # Calls in one process share its standard output, so a rehearsal makes them one by one.
    ended = [verify(name) for name in names] if context.rehearse else context.at_once(verify, names)
    for name, done in zip(names, ended, strict=True):
        report.check(f"{name} resumes to the last bit", done.code == 0, done.reason)
    backend = "gloo" if context.rehearse else "nccl"
    for arm, options in ranks.items():
        where = context.scratch / f"rank-{arm.replace(':', '-')}"
        words = ("--launcher", "torchrun", "--dist-backend", backend, "--device", context.device)
        done = context.ampcompare("run", "--arm", arm, *options, *words, *SMALL, "-o", str(where))
        seen = _backend_of(where) if done.code == 0 else done.reason
        report.check(f"{arm} with {' '.join(options)} trains over {backend}", seen == backend, seen)
    report.says = f"{len(names)} runs resume to the last bit, {len(ranks)} train over {backend} on one rank"


def _backend_of(folder: Path) -> str:
    """Return what the record of the only run in a folder says that its processes talked by."""
    records = list(folder.glob("cells/*/record.json"))
    if len(records) != 1:
        return f"{len(records)} records"
    return str(json.loads(records[0].read_text())["processes"]["backend"])
