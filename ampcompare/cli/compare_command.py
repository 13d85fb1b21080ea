"""`ampcompare compare`: train a matrix of arms and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ampcompare.backends.arm import Arm
from ampcompare.cli.arm_options import arm_from_flags, arm_options
from ampcompare.cli.comparison_output import details_option, show_checks, show_comparison, show_plan
from ampcompare.cli.help import ARMS, COMPARISON, MACHINE, OUTPUT, option
from ampcompare.cli.launching import count_processes, launch_from, launch_options, pool_options, save_at_signals
from ampcompare.cli.options import callback_option, margin_options, objective_option, output_options, recipe_options
from ampcompare.cli.script_options import ScriptCommand, script_options, show_metrics
from ampcompare.cli.settings import request_from
from ampcompare.cli.values import ARM, ARM_LIST, FILE, FOLDER
from ampcompare.cli.waiting import typed_command, wait_seconds
from ampcompare.experiment.follow import load_callback
from ampcompare.experiment.options import CompareOptions, to_seconds
from ampcompare.experiment.plan import parse_vary
from ampcompare.settings.script import SCRIPT_ARMS

__all__ = ["command", "options_from"]


@click.command(
    "compare",
    cls=ScriptCommand,
    common=[
        *("--arm", "--reference", "--seeds", "--margin", "--arch", "--data", "--data-dir", "--epochs", "--batch-size"),
        *("--lr", "--optimizer", "--recipe", "--device", "--fail-on", "--output-dir"),
    ],
    examples=[
        ("Nine arms, three seeds each, on the bundled digits:", "ampcompare compare"),
        (
            "Can O2 be replaced on your data?",
            "ampcompare compare --arm O2,fp16,bf16 --reference O2 --data imagefolder:DIR",
        ),
        (
            "In CI: end with 1 if bf16 is less accurate:",
            "ampcompare compare --arm fp32,bf16 --fail-on accuracy:non-inferior",
        ),
    ],
)
@option(
    "--arm",
    "arms",
    multiple=True,
    type=ARM_LIST,
    group=ARMS,
    help="arms such as fp32, bf16, O2 or apex:O2,loss_scale=128; repeatable, or comma-separated  [default: nine arms]",
)
@option(
    "--reference",
    type=ARM,
    group=ARMS,
    help="arm that the others are compared with; added if not listed  [default: script, else fp32, else the first]",
)
@arm_options
@option(
    "--seeds",
    metavar="SEEDS",
    group=COMPARISON,
    help="such as 0-4 or 0,2,7; auto: as many as the margin needs  [default: 0-2]",
)
@margin_options
@option(
    "--loss-margin",
    type=float,
    default=1.0,
    show_default=True,
    metavar="PERCENT",
    group=COMPARISON,
    help="equivalence margin of the training loss over the last fifth of the steps",
)
@objective_option
@option(
    "--looks",
    type=click.IntRange(1),
    metavar="N",
    group=COMPARISON,
    help="number of tests planned as seeds are added; 1: test once  [default: open]",
)
@option(
    "--fail-on",
    multiple=True,
    metavar="LIMIT",
    group=COMPARISON,
    help='exit with 1 if an arm exceeds it: "accuracy<-0.5", "time>1.10x", "memory>5%", "diverged>0", or if it lacks a '
    'verdict: "accuracy:non-inferior", "time:better"; repeatable',
)
@option("--baseline", type=FILE, group=COMPARISON, help="report.json or run directory: baseline for --fail-on")
@option("--strict", is_flag=True, group=COMPARISON, help="exit with 3 if any arm failed")
@option(
    "--budget",
    default="30m",
    show_default=True,
    metavar="TIME",
    group=COMPARISON,
    help="wall time limit of --seeds auto",
)
@option(
    "--sweep",
    multiple=True,
    metavar="SETTING=A,B",
    group=COMPARISON,
    help="sweep a setting: a row for each value, as in workers=0,2; repeatable",
)
@script_options
@recipe_options
@pool_options(
    "cells to run in parallel, each on its own GPUs or cores; times are compared on equal GPUs only; under Slurm, "
    "at most so many jobs  [default: one per free GPU, or 1]"
)
@option(
    "--timing-rounds",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    group=MACHINE,
    help="after the runs of a seed, time its arms N more times, in turns",
)
@option("--profile", is_flag=True, group=OUTPUT, help="after the runs, profile each arm: why is it faster, or not")
@launch_options
@details_option
@option("--tag", default="", metavar="NAME", group=OUTPUT, help="label of the report and its folder")
@output_options
@option("--progress-interval", metavar="TIME", group=OUTPUT, help="log progress every TIME  [default: 1m without bars]")
@option("--tensorboard", type=FOLDER, group=OUTPUT, help="write event files for TensorBoard after each cell")
@callback_option()
@option("--junit", type=FILE, group=OUTPUT, help="write the results of arms and limits as JUnit XML")
def command(**parameters: Any) -> int:
    """Train a matrix of arms and seeds and print them side by side.

    All arms of one seed start from the same weights and see the same batches. Running the same command again resumes
    where it stopped.
    """
    from ampcompare.cli.progress_display import Display
    from ampcompare.experiment.compare import plan_comparison, run_comparison

    as_json, quiet, interval = parameters["as_json"], parameters["quiet"], parameters["progress_interval"]
    options = options_from(parameters)
    if parameters["list_metrics"]:
        return show_metrics(plan_comparison(options).plan.cells[0])
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
        "reference",
        "seeds",
        "margin",
        "time_margin",
        "loss_margin",
        "looks",
        "objective",
        "tag",
        "jobs",
        "gpus",
        "timing_rounds",
        "profile",
        "fail_on",
        "strict",
        "force",
    )
    return CompareOptions(
        arms=_arms(parameters),
        settings=request_from({**parameters, "processes": count_processes(parameters)}),
        budget_seconds=to_seconds("--budget", parameters["budget"]),
        sweep=tuple(map(parse_vary, parameters["sweep"])),
        wait_seconds=wait_seconds(parameters["wait"]),
        launch=launch_from(parameters),
        callbacks=tuple(map(load_callback, parameters["callbacks"])),
        command=typed_command(),
        **paths,
        **{name: parameters[name] for name in same},
    )


def _arms(parameters: dict[str, Any]) -> tuple[str, ...]:
    """Return the arms of `--arm`; or the one that `--backend` and its options name, next to its reference."""
    arms: tuple[str, ...] = parameters["arms"]
    arm = arm_from_flags(parameters, is_named=bool(arms))
    if arm is None:
        return arms or (SCRIPT_ARMS if parameters["script"] is not None else ())
    return tuple(dict.fromkeys([str(Arm.parse(parameters["reference"] or "fp32")), arm]))
