"""What is lost when a pool is killed: a signal at a random moment to the command or any process of it, many times.

    python benchmarks/kill_pool.py [--rounds 20] [--seed 0] [--out docs/benchmarks/kill-pool]

An undisturbed comparison runs first, two cells at a time on cores of their own. Then the same command runs in another
folder, again and again: at a random moment SIGINT, SIGTERM or SIGKILL goes to the command, to a server or to a cell. A
command that the signal does not end has up to a second, and is then ended by SIGTERM. After each round no process may
be left after 10 s, every file is whole, each cell that had ended has its record, and no exit code is that of an
internal error. At last the command runs to its end: weights, losses and metrics of all cells must equal those of the
undisturbed comparison.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import psutil
from harness import environment, load, make_table, write_results

from ampcompare.results.records.comparison import read_comparison
from ampcompare.results.records.run import RunRecord, read_record

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
TARGETS = ("command", "server", "cell")
LIMIT = 10.0  # seconds for all processes to end
SAVE_SECONDS = 60.0  # for a command that was asked to stop
INTERNAL_ERROR = 70
WORDS = (
    *("compare", "--arm", "fp32,native:bf16,half:bf16", "--data", "synthetic", "--train-size", "256"),
    *("--val-size", "64", "--image-size", "8", "--arch", "mlp", "--epochs", "12", "--batch-size", "16"),
    *("--device", "cpu", "--quiet", "--jobs", "2"),
)


def _start(folder: Path, seeds: int) -> subprocess.Popen[bytes]:
    """Start the command in a folder, where it writes to `run`; what it prints is not kept."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "ampcompare", *WORDS, "--seeds", f"0-{seeds - 1}", "-o", "run"]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=folder, env=environment(), stdout=quiet, stderr=quiet)


def _ended(folder: Path) -> dict[str, RunRecord]:
    """Return the records of the cells that have ended, by cell; half a file is an error."""
    if (folder / "run" / "report.json").exists():
        read_comparison(folder / "run" / "report.json")
    records = [read_record(path) for path in folder.glob("run/cells/*/record.json")]
    return {record.cell: record for record in records if record.status in ("completed", "diverged")}


def _results(folder: Path) -> dict[str, Any]:
    """Return of each cell what does not depend on when and where it ran."""
    results = {}
    for cell, record in _ended(folder).items():
        steps = (folder / "run" / "cells" / cell / "steps.jsonl").read_text(encoding="utf-8").splitlines()
        losses = [json.loads(line)["loss"] for line in steps]
        results[cell] = (record.summary.weights_sha256, record.summary.metric_final, losses)
    return results


def _target(command: psutil.Process, name: str) -> psutil.Process | None:
    """Return the command, a server or a cell; None where none of them runs at the moment."""
    if name == "command":
        return command
    servers = command.children()
    found = servers if name == "server" else [cell for server in servers for cell in server.children()]
    return random.choice(found) if found else None


def _round(folder: Path, seeds: int, longest: float, moments: random.Random) -> dict[str, Any]:
    before = _ended(folder)
    process = _start(folder, seeds)
    command = psutil.Process(process.pid)
    after, number, name = moments.uniform(0, longest), moments.choice(SIGNALS), moments.choice(TARGETS)
    deadline, target = time.monotonic() + after, None
    family: set[psutil.Process] = set()
    while process.poll() is None and (time.monotonic() < deadline or target is None):
        time.sleep(0.02)
        family |= _family(command)
        target = _target(command, name) if time.monotonic() >= deadline else None
    if target is not None:
        try:
            target.send_signal(number)
        except psutil.NoSuchProcess:
            target = None
        time.sleep(moments.uniform(0, 1))
        family |= _family(command)
        if name != "command" and process.poll() is None:
            process.terminate()
    code = process.wait(SAVE_SECONDS)
    ended = time.monotonic()
    left = psutil.wait_procs(list(family), timeout=LIMIT)[1]
    seconds = time.monotonic() - ended
    for each in left:
        each.kill()
    now = _ended(folder)
    lost = [cell for cell, record in before.items() if cell not in now or now[cell].started != record.started]
    hit = "none ran" if target is None else f"{number.name} to the {name}"
    return {
        "signal": hit,
        "after_seconds": round(after, 2),
        "exit_code": code,
        "ended": len(now),
        "lost": len(lost),
        "left": len(left),
        "seconds": round(seconds, 2),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each signal and process, with the range over its rounds."""
    lines = []
    for hit in sorted({row["signal"] for row in rows}):
        its = [row for row in rows if row["signal"] == hit]
        after = [row["after_seconds"] for row in its]
        codes = ", ".join(str(code) for code in sorted({row["exit_code"] for row in its}))
        ended = max(row["seconds"] for row in its)
        lines.append([hit, len(its), f"{min(after):.0f}-{max(after):.0f}", codes, f"{ended:.1f}"])
    headers = ["signal", "rounds", "after s", "exit codes", "s to the end, at most"]
    return f"{make_table(lines, headers)}\n\nEach round is in the JSON."


def _family(command: psutil.Process) -> set[psutil.Process]:
    try:
        return set(command.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


@click.command()
@click.option("--rounds", default=20, show_default=True)
@click.option("--seed", default=0, show_default=True, help="of the moments")
@click.option("--out", default=None, help="write OUT.json and OUT.md")
def main(rounds: int, seed: int, out: str | None) -> None:
    """Send signals to a pool of cells, and compare what it comes to with one that was left alone."""
    moments, rows = random.Random(seed), []
    random.seed(seed)
    seeds = max(2, rounds // 3)
    with tempfile.TemporaryDirectory() as name:
        undisturbed, disturbed = Path(name, "undisturbed"), Path(name, "disturbed")
        begin = time.monotonic()
        process, first = _start(undisturbed, seeds), 0.0
        while process.poll() is None:
            time.sleep(0.05)
            first = first or (time.monotonic() - begin if any(undisturbed.glob("run/cells/*/record.json")) else 0.0)
        if process.returncode:
            raise click.ClickException("the undisturbed comparison failed")
        work = time.monotonic() - begin
        cells = len(_ended(undisturbed))
        click.echo(f"undisturbed: {cells} cells in {work:.1f} s", err=True)
        longest = first + 2 * (work - first) / rounds
        for number in range(1, rounds + 1):
            rows.append(_round(disturbed, seeds, longest, moments))
            click.echo(f"round {number}: {rows[-1]}", err=True)
        code = _start(disturbed, seeds).wait()
        same = code == 0 and _results(undisturbed) == _results(disturbed)
    lost, left = sum(row["lost"] for row in rows), sum(row["left"] for row in rows)
    table = _table(rows)
    errors = sum(row["exit_code"] == INTERNAL_ERROR for row in rows)
    verdict = "equal" if same else "DO NOT EQUAL"
    text = (
        f"{table}\n\n{rounds} signals to a pool of {cells} cells. Run again to the end, it exits with {code}, and the "
        f"cells {verdict} those of the undisturbed comparison in weights, losses and metrics. Cells that had ended and "
        f"were lost: {lost}. Processes left 10 s after the end of the command: {left}. Internal errors: {errors}."
    )
    click.echo(text)
    if out is not None:
        facts = load()
        data = {"cells": cells, "rounds": rows, "same": same, "exit_code": code}
        write_results(out, "A pool that is killed and continued", __doc__, facts, text, data)
    if not same or lost or left or errors:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
