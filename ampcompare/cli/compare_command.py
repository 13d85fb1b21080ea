"""`ampcompare compare`: train a matrix of arms and seeds."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampcompare.cli.launching import check_slurm, count_processes, launch_options, launcher_for, sigterm_saves
from ampcompare.cli.options import output_options, recipe_options
from ampcompare.cli.output import say
from ampcompare.cli.settings import gather, plan_for, rows_for, seeds_text
from ampcompare.errors import ConfigError, Ended

if TYPE_CHECKING:
    from ampcompare.compare.plan import Plan
    from ampcompare.comparison import Comparison
    from ampcompare.report.junit import Check

__all__ = ["command"]


@click.command("compare")
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="ARM",
    help="an arm such as fp32, apex:O2 or native:bf16; repeat it  [default: nine arms]",
)
@click.option("--seeds", metavar="SEEDS", help="such as 0-4 or 0,2,7; auto: as many as the margin needs  [default: 0]")
@click.option(
    "--margin",
    type=float,
    default=0.5,
    show_default=True,
    help="points of top-1 that do not matter; choose it before the runs",
)
@click.option(
    "--time-margin", type=float, default=2.0, show_default=True, help="percent of the step time that do not matter"
)
@click.option(
    "--prefer",
    type=click.Choice(["accuracy", "time", "memory"]),
    default="time",
    show_default=True,
    help="what a recommended arm is to gain",
)
@click.option("--tag", default="", metavar="NAME", help="label of the report and its folder")
@click.option("--strict", is_flag=True, help="exit with 3 if any arm failed")
@click.option("--budget", default="30m", show_default=True, metavar="TIME", help="wall time of --seeds auto")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="cells at the same time; times mean nothing then",
)
@click.option(
    "--vary", "varied", multiple=True, metavar="SETTING=A,B", help="rows for values of a setting too: workers=0,2"
)
@click.option("--baseline", metavar="FILE", help="report.json or run directory that --fail-on holds each arm against")
@click.option(
    "--fail-on",
    "gates",
    multiple=True,
    metavar="LIMIT",
    help='exit with 1 if an arm is past it: "accuracy<-0.5", "time>1.10x", "memory>5%", "diverged>0"; repeat it',
)
@click.option("--notify-every", metavar="TIME", help="say this often how far it is, in a plain line  [default: never]")
@click.option(
    "--tensorboard", metavar="DIR", help="write an event file per arm and seed after each cell, for TensorBoard"
)
@click.option("--junit", metavar="FILE", help="write the outcome of arms and limits as JUnit XML")
@recipe_options
@launch_options
@output_options
def command(**parameters: Any) -> int:
    """Train a matrix of arms and seeds and print them side by side.

    All arms of one seed start from the same weights and see the same batches. Running the same command again goes on
    where it stopped.
    """
    from ampcompare.cli.show import Display
    from ampcompare.compare.auto import run_auto
    from ampcompare.compare.events import EventFiles
    from ampcompare.compare.gates import check_gates, parse_gate
    from ampcompare.compare.plan import parse_seeds
    from ampcompare.compare.reload import reload_comparison
    from ampcompare.compare.run import run_plan
    from ampcompare.compare.terms import Terms
    from ampcompare.compare.verdict import MIN_PAIRS
    from ampcompare.launch.several import Several
    from ampcompare.record import write_atomically
    from ampcompare.report.base import printable
    from ampcompare.report.files import FORMATS, write_reports
    from ampcompare.report.grid import room
    from ampcompare.report.junit import JUnit
    from ampcompare.report.terminal import Terminal

    terms = Terms(parameters["margin"], parameters["time_margin"] / 100, parameters["prefer"], parameters["tag"])
    gates = [parse_gate(text) for text in parameters["gates"]]
    baseline = reload_comparison(Path(parameters["baseline"])) if parameters["baseline"] else None
    parameters["processes"] = count_processes(parameters)
    gathered = gather(parameters)
    base, rows = gathered.config, rows_for(gathered, parameters)
    if "arm" in base.model_fields_set:
        raise ConfigError(f"a comparison takes arms, and the settings name one, arm: {base.arm}; write arms: [...]")
    words = _first(parameters["seeds"], seeds_text(gathered.matrix), str(base.recipe.seed))
    auto = words.strip() == "auto"
    budget = _seconds("--budget", parameters["budget"])

    def make(seeds: Sequence[int]) -> Plan:
        return plan_for(gathered, rows, seeds)

    plan = make(range(MIN_PAIRS) if auto else parse_seeds(words))
    label = "-".join(["compare", *(["auto"] if auto else []), *_safe(parameters["tag"]), plan.digest()])
    folder = Path(parameters["output_dir"] or Path("runs") / label)
    if parameters["dry_run"]:
        click.echo(_dry_run(plan, folder, as_json=parameters["as_json"]))
        return 0
    notify = _seconds("--notify-every", parameters["notify_every"]) if parameters["notify_every"] else None
    jobs = parameters["jobs"]
    check_slurm(parameters, {cell.launcher for cell in plan.cells}, jobs)
    launchers = [launcher_for(base, parameters, several_cells=True) for _ in range(jobs)]
    speaks = launchers[0].speaks
    display = Display(quiet=parameters["quiet"] or not speaks, bar=not parameters["no_progress"], notify_seconds=notify)
    events = EventFiles(Path(parameters["tensorboard"]), display.note) if parameters["tensorboard"] else None

    def save(comparison: Comparison, folder: Path) -> None:
        write_reports(comparison, folder)
        if events is not None:
            events.write(comparison, folder)

    settings: dict[str, Any] = {
        "command": shlex.join(["ampcompare", *sys.argv[1:]]),
        "terms": terms,
        "force": parameters["force"],
        "jobs": jobs,
        "observer": display,
        "save": save,
    }
    try:
        with launchers[0] if jobs == 1 else Several(launchers) as launcher, sigterm_saves(launcher):
            if auto:
                comparison = run_auto(make, folder, launcher, budget_seconds=budget, **settings)
            else:
                comparison = run_plan(plan, folder, launcher, **settings)
    except (KeyboardInterrupt, Ended):
        if remains := launchers[0].remains():
            display.note(remains)
        if (folder / "report.md").exists():
            display.note(f"what is done is in {folder / 'report.md'}")
        raise
    if not speaks:
        return 0
    checks = check_gates(gates, comparison, baseline) if gates else []

    def write_junit() -> None:
        """Write the cases, once the outcome was said: their place may be one that cannot be written to."""
        if parameters["junit"]:
            write_atomically(Path(parameters["junit"]), JUnit(checks).render(comparison))

    failed = [record for record in comparison.records if record.status == "failed"]
    if len(failed) == len(comparison.records) and len({record.error for record in failed}) == 1:
        if parameters["as_json"]:
            say(FORMATS["json"]().render(comparison), nl=False)
        click.echo(f"ampcompare: every cell failed: {printable(failed[0].error or '', 2000)}", err=True)
        write_junit()
        return int(failed[0].environment.get("exit_code", 3))
    reporter = FORMATS["json"]() if parameters["as_json"] else Terminal(room())
    say(reporter.render(comparison), nl=False)
    if not parameters["quiet"]:
        click.echo(f"report: {folder / 'report.md'}", err=True)
    write_junit()
    finished = any(record.status in ("completed", "diverged") for record in comparison.records)
    if not finished or (failed and parameters["strict"]):
        return 3
    return _passed(checks, quiet=parameters["quiet"])


def _passed(checks: Sequence[Check], *, quiet: bool) -> int:
    """Say which limits were not kept or not checked, and return the exit code."""
    from ampcompare.report.base import printable

    for check in checks:
        if check.skipped and not quiet:
            click.echo(
                f"note: {printable(f'{check.arm}: {check.gate} is not checked: {check.skipped}', 500)}", err=True
            )
    failures = [check for check in checks if check.failure]
    for check in failures:
        click.echo(f"failed: {printable(f'{check.arm}: {check.failure}', 500)}", err=True)
    return 1 if failures else 0


def _dry_run(plan: Plan, folder: Path, *, as_json: bool) -> str:
    """Return the cells of a plan and what they will take."""
    from ampcompare.compare.estimate import estimate
    from ampcompare.record import dump_json

    left = estimate(plan, folder)
    named = list(zip(plan.labels, plan.cells, strict=True))
    if as_json:
        cells = [{"cell": cell.digest(), "arm": label, "seed": cell.recipe.seed} for label, cell in named]
        return dump_json({"output_dir": str(folder), "cells": cells, "estimate": asdict(left)})
    lines = [f"{_cells(len(plan.cells))} into {folder}, in this order:"]
    lines += [f"  {cell.digest()}  {label}, seed {cell.recipe.seed}" for label, cell in named]
    if left.seconds is None or left.peak_bytes is None:
        lines.append(f"time and memory: unknown, for {folder} has no record of {', '.join(left.unknown)}")
    elif not left.cells:
        lines.append("time and memory: none, every cell has a record")
    else:
        minutes, seconds = divmod(round(left.seconds), 60)
        lines.append(
            f"time and memory: about {minutes}m{seconds:02d}s for {_cells(left.cells)} without a record, "
            f"at most {left.peak_bytes / 2**20:.1f} MiB for one, by the records that are there"
        )
    return "\n".join(lines)


def _cells(number: int) -> str:
    return "1 cell" if number == 1 else f"{number} cells"


def _seconds(option: str, text: str) -> float:
    from ampcompare.compare.duration import parse_duration

    seconds = parse_duration(text)
    if not seconds:
        raise ConfigError(f"{option} {text!r} is not a time such as 30m, 1h30m or 90s")
    return seconds


def _safe(tag: str) -> list[str]:
    """Return a tag as a part of a folder's name; none where nothing of it can stand there."""
    word = re.sub(r"[^A-Za-z0-9.]+", "-", tag).strip("-.")[:40]
    return [word] if word else []


def _first(*texts: str | None) -> str:
    return next(text for text in texts if text is not None)
