"""What is lost when `compare` is killed: SIGKILL at random moments, the same command again, and the same report.

    python benchmarks/kill_compare.py [--kills 10] [--seed 0] [--jobs 1] [--out docs/benchmarks/kill-compare]

An undisturbed comparison runs first. Then the same command runs in another folder and is killed, with SIGKILL and so
without a chance to tidy up, again and again, and at last runs to its end. Each moment is drawn in steps of training,
not in seconds: evenly from those that are left when the first cell of that call has begun, up to twice a kill's share
of them, so that every kill meets a comparison at work on any machine, and some cells end between two. Both reports must
agree in everything but times, memory, readings of the machine, and what is said of them. After each kill the files of
the folder are read: a report or record that is there is whole, and no process of the cells is left.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import psutil
from killed import folders, records, start
from results import write_results

PATIENCE = 30.0
POLL_SECONDS = 0.02
WORDS = (
    *("compare", "--arm", "fp32", "--arm", "apex:O1,engine=compat", "--arm", "apex:O2,engine=compat"),
    *("--arm", "native:bf16", "--seeds", "0-2", "--data", "synthetic", "--train-size", "512", "--val-size", "128"),
    *("--image-size", "8", "--arch", "mlp", "--epochs", "20", "--batch-size", "16", "--device", "cpu", "--quiet"),
)
MEASURED = {
    *("train_seconds", "eval_seconds", "step_seconds", "step_seconds_median", "step_seconds_iqr", "epoch_seconds"),
    *("epoch_seconds_sd", "data_seconds_median", "samples_per_second", "wall_seconds", "peak_bytes"),
    *("peak_reserved_bytes", "time", "memory"),
    *("readings", "environment", "reading", "placement", "started", "order", "start_seconds", "loader_start_seconds"),
    *("invalid_time", "written", "cells", "why"),  # of a look: digests of cells; of a next step: how long it takes
}


def _start(folder: Path, jobs: int) -> subprocess.Popen[bytes]:
    return start(folder, [*WORDS, "--jobs", str(jobs)])


def _await_cell(folder: Path, process: subprocess.Popen[bytes]) -> float:
    """Wait until this call has begun a cell, whose log is written again then; return when it was started."""
    began = time.time()
    while process.poll() is None:
        if any(path.stat().st_mtime >= began for path in folder.glob("run/cells/*/log.txt")):
            break
        time.sleep(0.005)
    return began


def _steps(folder: Path, since: float) -> int:
    """Return the steps of all cells that have a record, and of those that a call trains.

    Args:
        since: when the call was started; what an earlier one has left of a cell does not count.
    """
    count = 0
    for path in folder.glob("run/cells/*/steps.jsonl"):
        try:
            if path.with_name("record.json").exists() or path.stat().st_mtime >= since:
                count += path.read_bytes().count(b"\n")
        except FileNotFoundError:  # archived, as the cell is trained again
            continue
    return count


def _await_steps(folder: Path, process: subprocess.Popen[bytes], since: float, steps: float) -> None:
    while process.poll() is None and _steps(folder, since) < steps:
        time.sleep(POLL_SECONDS)


def _without_measured(value: Any) -> Any:
    """Return a report without what is measured rather than computed, at any depth."""
    if isinstance(value, dict):
        return {name: _without_measured(part) for name, part in value.items() if name not in MEASURED}
    return [_without_measured(part) for part in value] if isinstance(value, list) else value


def _report(folder: Path) -> Any:
    """Return the report without what is measured; its records by cell, as the order of the runs is drawn."""
    report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
    report["records"].sort(key=lambda record: record["cell"])
    return _without_measured(report)


def _left(processes: list[psutil.Process]) -> int:
    """Return how many processes outlive the one that was killed, after some time to notice."""
    return len(psutil.wait_procs(processes, timeout=PATIENCE)[1])


def page_text(cells: int, work: float, rows: list[list[Any]], code: int, same: bool) -> str:
    """Return what the page says of the kills, whose rows are in the JSON."""
    moments = [float(row[1]) for row in rows]
    verdict = "the same" if same else "NOT THE SAME"
    return (
        f"{len(rows)} kills of a comparison of {cells} cells that take {work:.1f} s undisturbed, {min(moments):.1f} to "
        f"{max(moments):.1f} s after a cell of the call had begun. Cells with a record: {rows[0][2]} after the first, "
        f"{rows[-1][2]} after the last. Run again to the end, it exits with {code}, and its report is {verdict} as the "
        f"undisturbed one, measurements aside. Processes left behind: {sum(row[4] for row in rows)}. No file was found "
        "in half."
    )


@click.command()
@click.option("--kills", default=10, show_default=True)
@click.option("--seed", default=0, show_default=True, help="of the moments")
@click.option("--jobs", default=1, show_default=True, help="cells at a time, each on its own cores")
@click.option("--out", default=None, help="write OUT.json and OUT.md")
def main(kills: int, seed: int, jobs: int, out: str | None) -> None:
    """Kill a comparison again and again, and compare its report with that of an undisturbed one."""
    moments = random.Random(seed)
    rows: list[list[Any]] = []
    with folders() as (undisturbed, disturbed):
        process = _start(undisturbed, jobs)
        _await_cell(undisturbed, process)
        begin = time.monotonic()
        if process.wait():
            raise click.ClickException("the undisturbed comparison failed")
        work = time.monotonic() - begin
        cells, steps = len(records(undisturbed)), _steps(undisturbed, math.inf)
        click.echo(f"undisturbed: {cells} cells in {work:.1f} s", err=True)
        last = steps - steps / cells / 2  # the last cell is then at work
        for kill in range(1, kills + 1):
            process = _start(disturbed, jobs)
            since = _await_cell(disturbed, process)
            begin, made = time.monotonic(), _steps(disturbed, since)
            share = min(1.0, 2 / (kills - kill + 1))
            _await_steps(disturbed, process, since, made + moments.uniform(0, share * (last - made)))
            time.sleep(moments.uniform(0, 2 * POLL_SECONDS))  # losses are written many steps at a time
            if process.poll() is not None:
                raise click.ClickException(f"the comparison was over before kill {kill}")
            moment = time.monotonic() - begin
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGKILL)
            process.wait()
            rows.append([kill, f"{moment:.2f}", len(records(disturbed)), len(family), _left(family)])
            click.echo(f"kill {kill} after {moment:.2f} s: {rows[-1][2]} cells have a record", err=True)
        code = _start(disturbed, jobs).wait()
        same = code == 0 and _report(undisturbed) == _report(disturbed)
    left = sum(row[4] for row in rows)
    text = page_text(cells, work, rows, code, same)
    click.echo(text)
    if out is not None:
        facts = f"{os.cpu_count()} cores, {jobs} cells at a time, load {os.getloadavg()[0]:.1f} at the end"
        data = {"cells": cells, "seconds": work, "kills": rows, "same": same, "exit_code": code}
        write_results(out, "Killed and continued", __doc__, facts, text, data)
    if not same or left:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
