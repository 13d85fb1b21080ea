"""Whether everything runs at all: every arm, every way to train in parallel that one GPU allows, every command."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.context import Context, Done
from benchmarks.gpu.report import Report, describe_runs

ARMS = (
    *("fp32", "fp32:tf32", "apex:O0", "apex:O1", "apex:O2", "apex:O3", "apex:O2,loss_scale=128"),
    *("native:fp16", "native:bf16", "half", "half:bn_fp32", "half:bf16", "half:dynamic", "half:bf16,dynamic"),
    *("half:masters=fp32,dynamic", "actnn:bits=2", "accelerate:fp16", "accelerate:bf16"),
    *("fabric:16-mixed", "fabric:bf16-mixed", "mmengine:fp16"),
    *("apex:O4", "apex:O5", "half:bf16,masters=fp32,state=bf16,grads=fp32", "half:bf16,rounding=stochastic"),
    *("half:bf16,kahan", "native:bf16,weights=bf16,masters=fp32"),
    *("fsdp:bf16", "fsdp:fp16"),
)
FUSED = ("--optimizer-implementation", "fused")
# One GPU trains with one process: its groups have one member and run the code of several all the same.
RUNS = {
    "ddp": ("--parallel", "ddp"),
    "apex-ddp with Apex's SyncBatchNorm": ("--parallel", "apex-ddp", "--sync-bn", "apex"),
    "a fused optimizer": FUSED,
    "a skip on the device": ("--skip-on-device",),
}
ONLY_ON_GPUS = {
    "dp": ("--parallel", "dp"),
    "ddp with torch's SyncBatchNorm": ("--parallel", "ddp", "--sync-bn", "torch"),
    "a CUDA graph": (*FUSED, "--cuda-graph"),
}
METHODS = (
    *("--ema-decay", "0.9", "--clip-grad", "1.0"),
    *("--grad-accum-steps", "2", "--prefetch", "2", "--channels-last"),
    *("--layerwise-lr", "larc", "--save-every-epochs", "1", "--save-apex-format"),
)
# In a folder of its own: next to it, `profile.py` would stand for the module of that name.
SCRIPT = Path(__file__).parent / "legacy" / "train.py"
REFUSED_ON_A_CPU = ("fp32:tf32", "mmengine:fp16")


def run(context: Context, report: Report) -> None:
    """Train with everything once, then call every command."""
    arms = list(installed_runs(context, report, {arm: ("--arm", arm) for arm in ARMS}))
    folder = context.scratch / "arms"
    small = ("--device", context.device, "--batch-size", "16", "--no-progress", "-q")
    size = ("--epochs", "1", "--train-size", "64", "--val-size", "32")
    words = [word for arm in arms for word in ("--arm", arm)]
    done = context.ampcompare("compare", *words, "--seeds", "0", *small, *size, "--json", "-o", str(folder))
    _check_arms(report, arms, done)
    runs = RUNS if context.rehearse else {**RUNS, **ONLY_ON_GPUS}
    for number, (name, options) in enumerate(runs.items()):
        where = ("-o", str(context.scratch / f"run-{number}"))
        _check(report, name, context.ampcompare("run", "--arm", "apex:O2", *options, *small, *size, *where))
    if context.rehearse:
        report.leave_out(f"{', '.join(ONLY_ON_GPUS)} (need a GPU)")
    trained = context.scratch / "methods"
    _check(
        report,
        "run",
        context.ampcompare("run", "--arm", "apex:O2", *METHODS, *small, *size, "-o", str(trained)),
    )
    commands = _check_commands(context, report, folder, trained)
    report.says = (
        f"{len(arms)} arms, {len(runs)} runs with options and {commands} other commands ran to their end"
    )


def installed_runs(
    context: Context, report: Report, runs: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the runs, options by name, whose arm can be tried here; leave out the others with the reason."""
    from ampcompare import Arm

    kept = {}
    for name, options in runs.items():
        arm = options[options.index("--arm") + 1]
        library = Arm.parse(arm).spec.library
        why = "" if library is None else library.why_missing()
        if context.rehearse and arm in REFUSED_ON_A_CPU:
            why = "needs a GPU"
        if why:
            report.leave_out(f"{name} ({why})")
        else:
            kept[name] = options
    return kept


def _check_arms(report: Report, arms: Sequence[str], done: Done) -> None:
    if (rows := done.document.get("arms")) is None:
        report.check("compare", False, done.reason)
        return
    seen = f"{len(rows)} of {len(arms)} arms, {done.reason}"
    report.check("compare", done.code == 0 and len(rows) == len(arms), seen)
    for row in rows:
        report.check(f"arm {row['arm']}", row["completed"] == 1, describe_runs(row))
    report.figures["arms"] = rows


def _check_commands(context: Context, report: Report, folder: Path, trained: Path) -> int:
    """Call every command but `run` and `compare` on what these left, and return how many there were."""
    saved = sorted(trained.glob("cells/*/checkpoints/step-*.pt"))
    calls = [
        ("doctor",),
        ("list",),
        ("explain", "apex:O2", "--arch", "convnet"),
        ("config", "show", "--lr", "0.1"),
        ("judge", "--example"),
        ("report", str(folder), "--format", "md"),
        (
            "convert",
            str(saved[0]) if saved else "no checkpoint",
            str(context.scratch / "native.pt"),
            "--to",
            "native",
        ),
    ]
    for words in calls:
        done = context.ampcompare(*words)
        _check(report, words[0], done)
        report.check(f"{words[0]} prints something", bool(done.out.strip()), done.reason)
    for level in ("O2",) if context.rehearse else ("O1", "O2"):
        _check_exec(context, report, level)
    return len(calls) + 1


def _check_exec(context: Context, report: Report, level: str) -> None:
    """Run a legacy script on our engine, and on the real Apex where that is given: the last lines are equal."""
    where = ("--device", "cpu") if context.rehearse else ()
    ours = context.ampcompare("exec", *where, str(SCRIPT), level)
    _check(report, f"exec at {level}", ours)
    last = [line for line in ours.out.splitlines() if line.startswith("LAST")]
    skipped = "'loss_scale': 32768.0" in "".join(last)
    report.check(
        f"exec at {level}: the overflow halved the loss scale", skipped, "; ".join(last) or ours.reason
    )
    report.figures[f"exec {level}"] = last
    if context.rehearse or context.apex_src is None:
        return
    with_apex = f"import sys; sys.path.insert(0, {str(context.apex_src)!r}); "
    start = with_apex + "from ampcompare.cli import main; sys.exit(main())"
    theirs = context.program([sys.executable, "-c", start, "exec", "--engine", "nvidia", str(SCRIPT), level])
    if theirs.code != 0:
        report.leave_out(f"exec at {level} on genuine Apex ({theirs.reason})")
        return
    real = [line for line in theirs.out.splitlines() if line.startswith("LAST")]
    report.check(f"exec at {level}: the last line of genuine Apex", last == real, f"{last}, Apex {real}")


def _check(report: Report, name: str, done: Done) -> None:
    report.check(f"{name} ends with 0", done.code == 0, done.reason)
