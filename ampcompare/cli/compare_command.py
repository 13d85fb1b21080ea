"""`ampcompare compare`: train a matrix of arms and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ampcompare.cli.comparison_output import details_option, show_checks, show_comparison, show_plan
from ampcompare.cli.launching import count_processes, launch_from, launch_options, save_at_signals
from ampcompare.cli.options import margin_options, objective_option, output_options, recipe_options
from ampcompare.cli.renamed import RenamedOption
from ampcompare.cli.settings import request_from
from ampcompare.cli.waiting import typed_command, wait_seconds
from ampcompare.experiment.options import CompareOptions, to_seconds
from ampcompare.experiment.plan import parse_vary

__all__ = ["command", "options_from"]


@click.command("compare")
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="ARM",
    help="an arm such as fp32, apex:O2 or native:bf16; repeat it  [default: nine arms]",
)
@click.option("--seeds", metavar="SEEDS", help="such as 0-4 or 0,2,7; auto: as many as the margin needs  [default: 0]")
@margin_options
@objective_option
@click.option("--tag", default="", metavar="NAME", help="label of the report and its folder")
@click.option(
    "--looks",
    type=click.IntRange(1),
    metavar="N",
    help="test N times in all as seeds are added, 1: never again; they share the 5 %  [default: open]",
)
@click.option("--strict", is_flag=True, help="exit with 3 if any arm failed")
@click.option("--budget", default="30m", show_default=True, metavar="TIME", help="wall time limit of --seeds auto")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="cells to run in parallel; disables the timing comparison",
)
@click.option(
    "--timing-rounds",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="time the arms of each seed N more times after their runs, in turns of some steps",
)
@click.option(
    "--sweep",
    cls=RenamedOption,
    multiple=True,
    metavar="SETTING=A,B",
    help="sweep a setting: a row for each value, as in workers=0,2",
)
@click.option("--baseline", metavar="FILE", help="report.json or run directory: baseline for --fail-on")
@click.option(
    "--fail-on",
    multiple=True,
    metavar="LIMIT",
    help='exit with 1 if an arm exceeds it: "accuracy<-0.5", "time>1.10x", "memory>5%", "diverged>0", or if it lacks a '
    'verdict: "accuracy:non-inferior", "time:better"; repeat it',
)
@click.option(
    "--progress-interval", cls=RenamedOption, metavar="TIME", help="log progress every TIME  [default: 1m without bars]"
)
@click.option(
    "--tensorboard", metavar="DIR", help="write an event file per arm and seed after each cell, for TensorBoard"
)
@click.option("--junit", metavar="FILE", help="write the results of arms and limits as JUnit XML")
@details_option
@recipe_options
@launch_options
@output_options
def command(**parameters: Any) -> int:
    """Train a matrix of arms and seeds and print them side by side.

    All arms of one seed start from the same weights and see the same batches. Running the same command again resumes
    where it stopped.
    """
    from ampcompare.cli.progress_display import Display
    from ampcompare.experiment.compare import plan_comparison, run_comparison

    as_json, quiet, interval = parameters["as_json"], parameters["quiet"], parameters["progress_interval"]
    options = options_from(parameters)
    if parameters["dry_run"]:
        show_plan(plan_comparison(options), as_json=as_json)
        return 0
    notify_seconds = to_seconds("--progress-interval", interval) if interval else None
    with Display(quiet=quiet, bar=not parameters["no_progress"], notify_seconds=notify_seconds) as display:
        outcome = run_comparison(options, observer=display, while_running=save_at_signals)
    if outcome.is_main:
        show_comparison(outcome, as_json=as_json, quiet=quiet, details=parameters["details"])
        outcome.write_junit()
        show_checks(outcome, quiet=quiet)
    return outcome.exit_code


def options_from(parameters: dict[str, Any]) -> CompareOptions:
    """Return what the parameters of the command ask for.

    Raises:
        ConfigError: a value that cannot be read.
    """
    paths: dict[str, Any] = {
        name: Path(parameters[name]) for name in ("output_dir", "baseline", "tensorboard", "junit") if parameters[name]
    }
    same = (
        "arms",
        "seeds",
        "margin",
        "time_margin",
        "looks",
        "objective",
        "tag",
        "jobs",
        "timing_rounds",
        "fail_on",
        "strict",
        "force",
    )
    return CompareOptions(
        settings=request_from({**parameters, "processes": count_processes(parameters)}),
        budget_seconds=to_seconds("--budget", parameters["budget"]),
        sweep=tuple(map(parse_vary, parameters["sweep"])),
        wait_seconds=wait_seconds(parameters["wait"]),
        launch=launch_from(parameters),
        command=typed_command(),
        **paths,
        **{name: parameters[name] for name in same},
    )
