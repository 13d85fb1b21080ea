"""`ampcompare compare`: train a matrix of arms and seeds."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from ampcompare.cli.launching import count_processes, launch_options, launcher_for
from ampcompare.cli.options import build_config, output_options, read_config_file, recipe_options
from ampcompare.errors import ConfigError

__all__ = ["command"]


@click.command("compare")
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="ARM",
    help="an arm such as fp32, apex:O2 or native:bf16; repeat it  [default: nine arms]",
)
@click.option("--seeds", metavar="SEEDS", help="such as 0-4 or 0,2,7  [default: 0]")
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
@click.option("--tag", default="", metavar="NAME", help="label of the report")
@click.option("--strict", is_flag=True, help="exit with 3 if any arm failed")
@recipe_options
@launch_options
@output_options
def command(**parameters: Any) -> int:
    """Train a matrix of arms and seeds and print them side by side.

    All arms of one seed start from the same weights and see the same batches. Running the same command again goes on
    where it stopped.
    """
    from ampcompare.cli.show import Display
    from ampcompare.compare.plan import DEFAULT_ARMS, make_plan, parse_seeds
    from ampcompare.compare.run import run_plan
    from ampcompare.compare.terms import Terms
    from ampcompare.record import dump_json
    from ampcompare.report.base import printable
    from ampcompare.report.files import FORMATS, write_reports

    from_file = read_config_file(parameters["config_file"])
    file_arms, file_seeds = from_file.pop("arms", None), from_file.pop("seeds", None)
    arms = list(parameters["arms"]) or _texts(file_arms) or list(DEFAULT_ARMS)
    terms = Terms(parameters["margin"], parameters["time_margin"] / 100, parameters["prefer"], parameters["tag"])
    parameters["processes"] = count_processes(parameters)
    base = build_config(parameters, from_file)
    if "arm" in base.model_fields_set:
        raise ConfigError(f"a comparison takes arms, and the settings name one, arm: {base.arm}; write arms: [...]")
    seeds = parse_seeds(_first(parameters["seeds"], _seeds(file_seeds), str(base.recipe.seed)))
    plan = make_plan(base, arms, seeds)
    folder = Path(parameters["output_dir"] or Path("runs") / f"compare-{plan.digest()}")
    if parameters["dry_run"]:
        if parameters["as_json"]:
            cells = [{"cell": cell.digest(), "arm": cell.arm, "seed": cell.recipe.seed} for cell in plan.cells]
            click.echo(dump_json({"output_dir": str(folder), "cells": cells}))
            return 0
        click.echo(f"{len(plan.cells)} cells into {folder}, in this order:")
        for cell in plan.cells:
            click.echo(f"  {cell.digest()}  {cell.arm}, seed {cell.recipe.seed}")
        return 0
    chosen = launcher_for(base.processes, parameters, several_cells=True)
    display = Display(quiet=parameters["quiet"] or not chosen.speaks, bar=not parameters["no_progress"])
    words = shlex.join(["ampcompare", *sys.argv[1:]])
    try:
        with chosen as launcher:
            comparison = run_plan(
                plan,
                folder,
                launcher,
                command=words,
                terms=terms,
                force=parameters["force"],
                observer=display,
                save=write_reports,
            )
    except KeyboardInterrupt:
        if (folder / "report.md").exists():
            display.note(f"what is done is in {folder / 'report.md'}")
        raise
    if not chosen.speaks:
        return 0
    failed = [record for record in comparison.records if record.status == "failed"]
    if len(failed) == len(comparison.records) and len({record.error for record in failed}) == 1:
        if parameters["as_json"]:
            click.echo(FORMATS["json"]().render(comparison), nl=False)
        click.echo(f"ampcompare: every cell failed: {printable(failed[0].error or '', 2000)}", err=True)
        return int(failed[0].environment.get("exit_code", 3))
    click.echo(FORMATS["json" if parameters["as_json"] else "table"]().render(comparison), nl=False)
    if not parameters["quiet"]:
        click.echo(f"report: {folder / 'report.md'}", err=True)
    finished = any(record.status in ("completed", "diverged") for record in comparison.records)
    return 3 if not finished or (failed and parameters["strict"]) else 0


def _first(*texts: str | None) -> str:
    return next(text for text in texts if text is not None)


def _seeds(seeds: Any) -> str | None:
    """Return the seeds of a config file as one text; a list counts as its parts."""
    if seeds is None:
        return None
    return ",".join(str(seed) for seed in seeds) if isinstance(seeds, list) else str(seeds)


def _texts(arms: Any) -> list[str]:
    if arms is None:
        return []
    if not isinstance(arms, list) or not all(isinstance(arm, str) for arm in arms):
        raise ConfigError(f"arms in the config file is {arms!r}; write a list of texts such as [fp32, 'apex:O2']")
    return arms
