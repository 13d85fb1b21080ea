"""Whether cells that run at the same time have a GPU each, and how much sooner they end than on one GPU.

A rehearsal pretends two GPUs by an nvidia-smi of its own, one more that somebody uses, and trains on the CPU.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import combinations
from pathlib import Path

from ampcompare.base.environment.gpus import Gpu, visible_gpus
from ampcompare.runs.records.comparison import read_comparison
from ampcompare.runs.records.run import RunRecord
from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Report

__all__ = ["run"]

ARMS = ("fp32", "native:bf16")
TINY = ("--arch", "mlp", "--data", "synthetic", "--train-size", "64", "--val-size", "32", "--epochs", "1")
# A cell of about twenty seconds on a large GPU, of which the start is a small part.
LONG = (
    *("--arch", "resnet18", "--data", "synthetic", "--image-size", "64", "--train-size", "50000", "--val-size", "512"),
    *("--batch-size", "128", "--epochs", "2"),
)
CELLS = 8
SPEED_UP = 0.9  # of linear


def run(context: Context, report: Report) -> None:
    """Compare on all GPUs and on a named one; on several real ones, measure the gain."""
    with _pretended(context.scratch) if context.rehearse else contextlib.nullcontext():
        found = visible_gpus()
        free = [gpu for gpu in found if not gpu.in_use] or found
        report.figures["gpus"] = [vars(gpu) for gpu in found]
        report.check("nvidia-smi lists GPUs", bool(found))
        if not found:
            return
        _check_places(context, report, free)
        several = len({gpu.name for gpu in free}) == 1 and len(free) > 1
        if context.rehearse:
            report.leave_out("times and speed-up (a rehearsal judges none)")
            report.says = f"cells had {len(free)} pretended GPUs to themselves"
        elif several:
            _check_gain(context, report, free)
        else:
            report.leave_out(f"speed-up (needs several free GPUs of one kind; here are {len(free)})")
            report.says = "a cell had the GPU that was named"


def _check_places(context: Context, report: Report, free: Sequence[Gpu]) -> None:
    count = max(2, len(free))
    seeds = f"0-{-(-count // len(ARMS)) - 1}" if count > len(ARMS) else "0"
    records = _compare(context, report, "on all free GPUs", *TINY, "--seeds", seeds)
    if records and len(free) > 1:
        used = {token for record in records for token in _tokens(record)}
        report.check("every free GPU was used", used == {gpu.token for gpu in free}, ", ".join(sorted(used)))
        alone = all(len(_tokens(record)) == 1 and record.jobs == len(free) for record in records)
        report.check("each record names one GPU", alone, str([_tokens(record) for record in records]))
        both = [pair for pair in combinations(records, 2) if set(_tokens(pair[0])) & set(_tokens(pair[1]))]
        report.check("no two cells were on a GPU at the same time", not any(_overlap(*pair) for pair in both))
    last = free[-1]
    named = _compare(context, report, "on a named GPU", *TINY, "--seeds", "0", "--gpus", str(last.number))
    tokens = {tuple(_tokens(record)) for record in named}
    report.check("a named GPU is the one that is used", tokens == {(last.token,)}, str(tokens))


def _check_gain(context: Context, report: Report, free: Sequence[Gpu]) -> None:
    words = (*LONG, "--seeds", f"0-{CELLS // len(ARMS) - 1}")
    seconds = {}
    for name, gpus in (("all", free), ("one", free[:1])):
        begin = time.perf_counter()
        numbers = ",".join(str(gpu.number) for gpu in gpus)
        records = _compare(
            context, report, f"{CELLS} cells on {name} of the GPUs", *words, "--gpus", numbers, most=400.0
        )
        seconds[name] = time.perf_counter() - begin
        if len(records) < CELLS:
            return
    gain, linear = seconds["one"] / seconds["all"], CELLS / -(-CELLS // len(free))
    report.figures["seconds"] = seconds
    name = f"at least {SPEED_UP * linear:.1f} times as fast on {len(free)} GPUs as on one"
    report.check(name, gain >= SPEED_UP * linear, f"{gain:.2f}")
    report.says = f"{CELLS} cells ended {gain:.1f} times as soon on {len(free)} GPUs as on one"


def _compare(context: Context, report: Report, name: str, *words: str, most: float = 120.0) -> list[RunRecord]:
    """Return the records of a comparison, all of which have to be completed; none where it failed."""
    folder = context.scratch / name.replace(" ", "-")
    command = [sys.executable, "-m", "ampcompare", "compare", "--arm", ",".join(ARMS), *words]
    done = context.program([*command, "--no-progress", "-q", "-o", str(folder)], most=most)
    path = folder / "report.json"
    records = read_comparison(path).records if path.exists() else []
    ended = sum(record.status == "completed" for record in records)
    report.check(f"cells end {name}", done.code == 0 and ended == len(records) > 0, done.reason)
    return list(records)


def _tokens(record: RunRecord) -> list[str]:
    return [] if record.placement is None else record.placement.gpus


def _overlap(one: RunRecord, other: RunRecord) -> bool:
    spans = []
    for record in (one, other):
        begin = datetime.fromisoformat(record.started or "").timestamp()
        spans.append((begin, begin + (record.summary.wall_seconds or 0.0)))
    return max(begin for begin, _ in spans) < min(end for _, end in spans)


@contextlib.contextmanager
def _pretended(folder: Path) -> Iterator[None]:
    """Put an nvidia-smi on the path that lists two free GPUs and one that a process uses."""
    count, own = 3, folder / "bin"
    query = [f"{n}, GPU-0{n}, Pretended, 00000000:{n:02X}:00.0, 4" for n in range(count)]
    listed = [f"GPU {n}: Pretended (UUID: GPU-0{n})" for n in range(count)]
    script = ["#!/bin/sh", 'case "$1" in']
    for pattern, lines in (("--query-gpu*", query), ("--query-compute*", ["GPU-01, 1"]), ("-L", listed)):
        script += [f"{pattern}) cat <<'END'", *lines, "END", ";;"]
    own.mkdir()
    (own / "nvidia-smi").write_text("\n".join([*script, "esac", ""]))
    (own / "nvidia-smi").chmod(0o755)
    before = dict(os.environ)
    os.environ["PATH"] = f"{own}{os.pathsep}{os.environ['PATH']}"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
