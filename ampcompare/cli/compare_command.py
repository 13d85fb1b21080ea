"""`ampcompare compare`: train a matrix of arms and seeds."""

import re
from pathlib import Path
from typing import Any

import click

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.base.formatting import format_ordinal
from ampcompare.base.option_rules import refusal_sentence, rule_of_need
from ampcompare.cli.comparison_output import details_option, show_comparison, show_failed_gates, show_plan
from ampcompare.cli.forms import AllNamesBut, CommandForm, default_form, form_asked_by_parameter
from ampcompare.cli.help import ARMS, COMPARISON, MACHINE, OUTPUT, SCRIPT, make_option_from_signature, option
from ampcompare.cli.launching import (
    add_launch_options,
    count_processes_asked_for,
    options_from_parameters,
    save_and_end_at_signals,
)
from ampcompare.cli.output import print_folded_on_stderr
from ampcompare.cli.settings import (
    ScriptCommand,
    add_script_options,
    print_script_metrics,
    settings_request_from,
)
from ampcompare.cli.shared_options import (
    ARM_FLAGS,
    SETTING_OPTIONS,
    add_arm_options,
    add_output_options,
    arm_from_flags,
    first_weights_option,
    margin_options,
    recipe_options,
    rules_of_arm_options,
    stack_option,
)
from ampcompare.cli.values import FILE, FOLDER
from ampcompare.experiment.plan import parse_varied_path_and_values
from ampcompare.experiment.run_options import CompareOptions, parse_seconds
from ampcompare.settings.reads import KEEP_STEP, TRAIN, VERIFY_RESUME
from ampcompare.settings.script import SCRIPT_ARMS

OF_RESUMPTION = (
    "arms",
    "reference",
    "backend",
    *ARM_FLAGS,
    "seeds",
    "compat_torch",
    "quiet",
    *SETTING_OPTIONS,
)
OF_ONE_STEP = ("seeds", "seed_arg", "compat_torch", "quiet", *SETTING_OPTIONS)
RESUME = form_asked_by_parameter(
    "--verify-resume STEP", "resume_step", (*OF_RESUMPTION, "resume_args"), ", which trains no comparison"
)
CAPSULE = form_asked_by_parameter(
    "--capsule STEP", "capsule", OF_ONE_STEP, ", which keeps a step of one process of the script as it is"
)


def _parse_jobs(context: Any, parameter: Any, value: str | None) -> int | str | None:
    """Return the number of --jobs, "auto", or another word, which the rules of the option refuse."""
    if value and value.isdecimal():
        return int(value)
    return value and value.lower()


# What these print depends on every option of the comparison.
LIST_METRICS = form_asked_by_parameter(
    "--list-metrics", "list_metrics", AllNamesBut(("resume_args", "dry_run", "emit_cells"))
)
DRY_RUN = form_asked_by_parameter("--dry-run", "dry_run", AllNamesBut(("resume_args", "emit_cells")))
EMIT_CELLS = form_asked_by_parameter("--emit-cells", "emit_cells", AllNamesBut(("resume_args",)))
FORMS = (RESUME, CAPSULE, LIST_METRICS, DRY_RUN, EMIT_CELLS, default_form(AllNamesBut(("resume_args",))))
RULES = (
    rule_of_need(
        "--verify-resume STEP",
        "resume_step",
        "a script",
        "script",
        advice="write: ampcompare compare --verify-resume STEP -- SCRIPT ARGS..., or for a recipe ampcompare run "
        "--verify-resume",
    ),
    rule_of_need(
        "--capsule STEP",
        "capsule",
        "a script",
        "script",
        advice="write: ampcompare compare --capsule STEP -- SCRIPT ARGS...",
    ),
    *rules_of_arm_options("arms"),
)

compare_option = make_option_from_signature(CompareOptions)


@click.command(
    "compare",
    cls=ScriptCommand,
    forms=FORMS,
    rules=RULES,
    common=[
        *("--arm", "--reference", "--seeds", "--margin", "--arch"),
        *("--data", "--data-dir", "--epochs", "--batch-size"),
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
@compare_option(
    "--arm",
    "arms",
    multiple=True,
    metavar="ARM[,ARM...]",
    group=ARMS,
    help="arms such as fp32, bf16, O2 or apex:O2,loss_scale=128; repeatable, or comma-separated  [default: nine arms]",
)
@compare_option(
    "--reference",
    metavar="ARM",
    group=ARMS,
    help="arm that the others are compared with; added if not listed  [default: script, else fp32, else the first]",
)
@stack_option(compare_option)
@first_weights_option(compare_option)
@add_arm_options
@compare_option(
    "--seeds",
    metavar="SEEDS",
    group=COMPARISON,
    help="such as 0-4 or 0,2,7; auto: as many as the margin needs  [default: 0-2]",
)
@margin_options(compare_option)
@compare_option("--loss-margin", metavar="PERCENT", group=COMPARISON)
@compare_option("--objective", group=COMPARISON)
@compare_option("--looks", type=click.IntRange(1), metavar="N", group=COMPARISON)
@compare_option(
    "--fail-on",
    multiple=True,
    metavar="LIMIT",
    group=COMPARISON,
    help='exit with 1 if an arm exceeds it: "accuracy<-0.5", "time>1.10x", "memory>5%", "diverged>0", or if it lacks a '
    'verdict: "accuracy:non-inferior", "time:better"; repeatable',
)
@compare_option("--baseline", type=FILE, group=COMPARISON)
@option("--strict", is_flag=True, group=COMPARISON, help="exit with 3 if any arm failed")
@compare_option(
    "--budget", metavar="TIME", group=COMPARISON, help="wall time limit of --seeds auto  [default: 30m]"
)
@compare_option(
    "--sweep",
    multiple=True,
    metavar="SETTING=A,B",
    group=COMPARISON,
    help="sweep a setting: a row for each value, as in workers=0,2; repeatable",
)
@add_script_options
@recipe_options(TRAIN)
@compare_option(
    "--jobs",
    callback=_parse_jobs,
    metavar="N|auto",
    group=MACHINE,
    help="cells to run in parallel, each on its own GPUs or cores; times are compared on equal GPUs only; under Slurm, "
    "at most so many jobs  [default: one per free GPU, or 1]",
)
@compare_option("--gpus", metavar="LIST", group=MACHINE)
@option(
    "--emit-cells",
    type=FILE,
    group=MACHINE,
    help="write a command for each cell that has no record, one a line, for another scheduler, and train nothing",
)
@compare_option("--timing-rounds", type=click.IntRange(0), metavar="N", group=MACHINE)
@compare_option("--twin", group=ARMS)
@compare_option("--preflight/--no-preflight", group=MACHINE)
@option(
    "--verify-resume",
    "resume_step",
    type=click.IntRange(1),
    metavar="STEP",
    group=SCRIPT,
    help="with -- SCRIPT: in place of the comparison, stop the script under each arm once it has saved at or behind "
    "STEP, start it again from the arm's own file, and compare with a run without a break",
)
@option(
    "--resume-args",
    metavar="ARGS",
    group=SCRIPT,
    help="with --verify-resume: added to the script's arguments when it is started again: {checkpoint} is the file "
    "that it saved last, {folder} its folder",
)
@option(
    "--capsule",
    type=click.IntRange(0),
    metavar="STEP",
    group=SCRIPT,
    help="with -- SCRIPT: in place of the comparison, keep this step of the script as it is, with the first seed, in "
    "capsule.pt for `ampcompare replay`",
)
@add_launch_options
@details_option
@compare_option("--tag", metavar="NAME", group=OUTPUT)
@add_output_options
@option(
    "--progress-interval",
    metavar="TIME",
    group=OUTPUT,
    help="log progress every TIME  [default: 1m without bars]",
)
@compare_option("--tensorboard", type=FOLDER, group=OUTPUT)
@compare_option("--junit", type=FILE, group=OUTPUT)
def command(asked: CommandForm, **parameters: Any) -> int:
    """Train a matrix of arms and seeds and print them side by side.

    All arms of one seed start from the same weights and see the same batches. Running the same command again resumes
    where it stopped.
    """
    from ampcompare.cli.progress_display import ProgressDisplay
    from ampcompare.experiment.compare import run_comparison

    as_json = parameters["as_json"]
    quiet = parameters["quiet"]
    interval = parameters["progress_interval"]
    options = compare_options_from_parameters(parameters)
    if (code := run_instead_of_comparison(asked, options, parameters)) is not None:
        return code
    notify_seconds = parse_seconds("--progress-interval", interval) if interval else None
    with ProgressDisplay(
        quiet=quiet, bar=not parameters["no_progress"], notify_seconds=notify_seconds
    ) as display:
        outcome = run_comparison(options, observer=display, while_running=save_and_end_at_signals)
    show_comparison(outcome, as_json=as_json, quiet=quiet, details=parameters["details"])
    outcome.write_junit()
    show_failed_gates(outcome, quiet=quiet)
    return outcome.exit_code


def _verify_resume(options: CompareOptions, parameters: dict[str, Any]) -> int:
    """Verify that a script resumes under each arm, and return the exit code."""
    from ampcompare.base.environment.extras import require_torch
    from ampcompare.experiment.compare import plan_comparison
    from ampcompare.experiment.launch.script.exec_fields import exec_fields_of_script
    from ampcompare.experiment.script_resume import ResumeCheck, verify_resumption_under_arms
    from ampcompare.script.invocation.exec_settings import exec_fields_for_resume_check

    require_torch()
    VERIFY_RESUME.refuse_unread_settings(options.settings.layers)
    cells = plan_comparison(options).plan.cells
    config = cells[0]
    script = config.script
    assert script is not None
    if script.torchrun or any(cell.stack is not None for cell in cells):
        raise ConfigError(
            refusal_sentence(
                "--verify-resume",
                "is for one process in this environment",
                "leave out --nproc-per-node and @",
            )
        )
    if options.seeds is not None and len(seeds := {cell.recipe.seed for cell in cells}) > 1:
        raise ConfigError(
            refusal_sentence(
                "--verify-resume",
                f"is for one seed of each arm, not {len(seeds)}",
                "name one, as in --seeds 3",
            )
        )
    arms = dict.fromkeys(str(cell.arm) for cell in cells)
    settings = exec_fields_for_resume_check(exec_fields_of_script(config), script.name, script.arguments)
    check = ResumeCheck(parameters["resume_step"], parameters["resume_args"])
    return verify_resumption_under_arms(
        list(arms), settings, check, is_module=script.is_module, say=click.echo
    )


def _run_script_keeping_capsule(options: CompareOptions, step: int) -> int:
    """Keep a step of the script with the seed and the arguments of its first cell, and return the exit code."""
    from ampcompare.base.environment.extras import require_torch
    from ampcompare.experiment.compare import plan_comparison
    from ampcompare.experiment.launch.script.exec_fields import exec_fields_of_script

    require_torch()
    KEEP_STEP.refuse_unread_settings(options.settings.layers)
    from ampcompare.script.invocation.exec_settings import settings_of_kept_step
    from ampcompare.script.invocation.target import target_of
    from ampcompare.script.replay.keep import keep_step_in_capsule

    config = plan_comparison(options).plan.cells[0]
    script = config.script
    assert script is not None
    arguments = script.arguments_for(config.recipe.seed, "script", Path.cwd())
    settings = settings_of_kept_step(exec_fields_of_script(config), script.name, arguments)
    target = target_of(script.name, arguments, is_module=script.is_module)
    return keep_step_in_capsule(target, settings, step, Path("capsule.pt").absolute())


def run_instead_of_comparison(
    asked: CommandForm, options: CompareOptions, parameters: dict[str, Any]
) -> int | None:
    """Do what is asked for in the place of a comparison, and return the exit code; None for a comparison."""
    from ampcompare.experiment.compare import plan_comparison, preflight_planned_rows, write_cell_commands
    from ampcompare.experiment.preflight import (
        require_different_runs_by_seed,
        require_trainable_arm_and_metrics,
    )

    if asked is RESUME:
        return _verify_resume(options, parameters)
    if asked is CAPSULE:
        return _run_script_keeping_capsule(options, parameters["capsule"])
    if asked is LIST_METRICS:
        return print_script_metrics(plan_comparison(options).plan.cells[0])
    if asked is DRY_RUN:
        planned = plan_comparison(options)
        found = preflight_planned_rows(planned)
        show_plan(planned, found, as_json=parameters["as_json"])
        if found is not None:
            require_trainable_arm_and_metrics(found)
            if options.seeds is not None:
                require_different_runs_by_seed(found, planned.plan.seeds)
        return 0
    if asked is EMIT_CELLS:
        file = parameters["emit_cells"]
        count = write_cell_commands(options, Path(file))
        click.echo(
            f"{count} commands are in {file}; when they have ended, run this again without --emit-cells"
        )
        return 0
    return None


def compare_options_from_parameters(parameters: dict[str, Any]) -> CompareOptions:
    """Return what the parameters of the command ask for."""
    request = settings_request_from({**parameters, "processes": count_processes_asked_for(parameters)})
    budget = None if parameters["budget"] is None else parse_seconds("--budget", parameters["budget"])
    options = options_from_parameters(
        CompareOptions, parameters, arms=_arms_from_flags(parameters), budget=budget, sweep=None
    )
    options = options.with_attributes(
        settings=request,
        sweep=tuple(map(parse_varied_path_and_values, parameters["sweep"])),
        strict=parameters["strict"],
    )
    if re.fullmatch("[1-9][0-9]*", parameters["seeds"] or "") and not parameters["quiet"]:
        seed = int(parameters["seeds"])
        print_folded_on_stderr(
            f"note: --seeds {seed} is one seed, the {format_ordinal(seed + 1)}; {seed} seeds are --seeds 0-{seed - 1}"
        )
    return options


def _arms_from_flags(parameters: dict[str, Any]) -> tuple[str, ...]:
    """Return the arms of `--arm`; or the one that `--backend` and its options name, next to its reference."""
    arms: tuple[str, ...] = parameters["arms"]
    arm = arm_from_flags(parameters)
    if arm is None:
        return arms or (SCRIPT_ARMS if parameters["script"] is not None else ())
    return tuple(dict.fromkeys([str(Arm.parse(parameters["reference"] or "fp32")), arm]))
