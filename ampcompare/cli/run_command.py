"""`ampcompare run`: train one arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import Ended
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.formatting import printable_line
from ampcompare.cli.comparison_output import details_option
from ampcompare.cli.forms import AllNamesBut, CommandForm, default_form, form_asked_by_parameter
from ampcompare.cli.help import ARMS, CHECKPOINTS, DATA, PROCESSES, make_option_from_signature, option
from ampcompare.cli.launching import (
    add_launch_options,
    count_processes_asked_for,
    options_from_parameters,
    save_and_end_at_signals,
)
from ampcompare.cli.output import print_document, print_folded_on_stderr, print_json
from ampcompare.cli.settings import (
    ScriptCommand,
    add_script_options,
    print_script_metrics,
    settings_request_from,
)
from ampcompare.cli.shared_options import (
    add_arm_options,
    add_output_options,
    arm_from_flags,
    first_weights_option,
    recipe_options,
    rules_of_arm_options,
    stack_option,
)
from ampcompare.experiment.run_options import LaunchOptions, RunOptions
from ampcompare.experiment.sources import SettingsSources, collect_settings
from ampcompare.settings.reads import TRAIN
from ampcompare.settings.stack import StackConfig, arms_with_stacks, parse_stacks, require_used_stacks

if TYPE_CHECKING:
    from ampcompare.experiment.single_run import ResumeVerification, RunOutcome

# What the first two print depends on every option of the run.
LIST_METRICS = form_asked_by_parameter(
    "--list-metrics", "list_metrics", AllNamesBut(("dry_run", "verify_resume"))
)
DRY_RUN = form_asked_by_parameter("--dry-run", "dry_run", AllNamesBut(("verify_resume",)))
VERIFY_RESUME = form_asked_by_parameter("--verify-resume", "verify_resume", AllNamesBut(()))
FORMS = (LIST_METRICS, DRY_RUN, VERIFY_RESUME, default_form(AllNamesBut(())))


@click.command(
    "run",
    cls=ScriptCommand,
    forms=FORMS,
    rules=rules_of_arm_options("arm_text"),
    common=[
        *("--arm", "--opt-level", "--arch", "--data", "--data-dir"),
        *("--epochs", "--batch-size", "--lr", "--optimizer"),
        *("--recipe", "--device", "--seed", "--resume", "--output-dir", "--json"),
    ],
    examples=[
        ("O2 on the bundled digits:", "ampcompare run --opt-level O2"),
        ("ResNet-18 on CIFAR-10, in bf16:", "ampcompare run --arm bf16 --arch resnet18 --data cifar10"),
        ("Resume from the newest checkpoint:", "ampcompare run --arm O1 --save-every-epochs 1 --resume auto"),
    ],
)
@option(
    "--arm",
    "arm_text",
    metavar="ARM",
    group=ARMS,
    help="backend and options in one word: fp32, bf16, O2 or apex:O2,loss_scale=128  [default: fp32]",
)
@stack_option(option)
@first_weights_option(option)
@add_arm_options
@option(
    "--seed",
    type=int,
    metavar="N",
    group=DATA,
    help="random seed of weights, order and augmentation  [default: 0]",
)
@details_option
@add_script_options
@recipe_options(TRAIN)
@option(
    "--verify-resume",
    is_flag=True,
    group=CHECKPOINTS,
    help="train with and without a stop, compare bit for bit; exit with 1 if they differ",
)
@add_launch_options
@make_option_from_signature(LaunchOptions)("--dist-url", metavar="URL", group=PROCESSES)
@add_output_options
def command(asked: CommandForm, **parameters: Any) -> int:
    """Train one arm and print its row.

    Defaults to fp32 on the bundled digits. Running the same command again shows the finished record.
    """
    from ampcompare.cli.progress_display import ProgressDisplay
    from ampcompare.experiment.single_run import check_run_options, run_single, verify_resume_of_run

    as_json, quiet = parameters["as_json"], parameters["quiet"]
    sources = settings_sources_from(parameters)
    if (name := parameters["first_weights"]) is not None:
        sources = sources.with_first_weights(name, parse_stacks(parameters["stacks"]))
    config = sources.config.model_copy(update={"stack": _stack_named_by_arm(parameters)})
    options = options_from_parameters(RunOptions, parameters, config=config)
    if asked is LIST_METRICS:
        return print_script_metrics(options.config)
    if asked is DRY_RUN:
        check_run_options(options)
        print_json(options.config)
        return 0
    if asked is VERIFY_RESUME:
        with ProgressDisplay(quiet=quiet, bar=not parameters["no_progress"]) as display:
            verification = verify_resume_of_run(
                options, observer=display, while_running=save_and_end_at_signals
            )
        _show_verification(verification, as_json=as_json)
        return 1 if verification.difference else 0
    with ProgressDisplay(quiet=quiet, bar=not parameters["no_progress"]) as display:
        outcome = run_single(options, observer=display, while_running=save_and_end_at_signals)
    if outcome.is_main:
        _show_run(outcome, as_json=as_json, quiet=quiet, details=parameters["details"])
    return outcome.exit_code


def settings_sources_from(parameters: Mapping[str, Any]) -> SettingsSources:
    """Return the settings of the one arm that the parameters of the command ask for."""
    named = parameters["arm_text"]
    arm = None if named is None else str(Arm.parse(named.rpartition("@")[0] or named))
    derived = {
        "arm_text": arm_from_flags(parameters) or arm,
        "processes": count_processes_asked_for(parameters),
    }
    return collect_settings(settings_request_from({**parameters, **derived}), TRAIN, one_run=True)


def _stack_named_by_arm(parameters: Mapping[str, Any]) -> StackConfig | None:
    """Return the stack that the arm names; None for an arm of this environment."""
    stacks = parse_stacks(parameters["stacks"])
    named = arms_with_stacks([parameters["arm_text"]], stacks) if parameters["arm_text"] is not None else []
    used = {stack.name for _, stack in named if stack is not None} | {parameters["first_weights"]}
    require_used_stacks(stacks, used)
    return named[0][1] if named else None


def _show_run(outcome: RunOutcome, *, as_json: bool, quiet: bool, details: bool) -> None:
    """Print the row of a run or the record as JSON, and the error of one that failed."""
    from ampcompare.experiment.run_directory import record_with_label
    from ampcompare.results.analysis.pairing.declared import ineffective_option_sentences
    from ampcompare.results.analysis.summary import summarize
    from ampcompare.results.report.documents.comparison import comparison_document

    record = outcome.record
    if as_json:
        print_json(record)
    if record.status == "failed":
        error = printable_line(record.error or "", 2000, keep_end=600)
        print_folded_on_stderr(
            f"ampcompare: {record.config.arm_with_stack} failed: {error} (log: {outcome.log_path})"
        )
    elif record.status == "interrupted":
        raise Ended(f"{record.arm} was {record.error}; --resume auto continues from its newest checkpoint")
    elif not as_json:
        label = record.config.arm_with_stack
        row = summarize([record_with_label(record, label)], arms=[label], reference=label)
        print_document(comparison_document(row), details=details)
        if record.ledger is not None:
            for sentence in ineffective_option_sentences(Arm.parse(record.arm), record.ledger):
                print_folded_on_stderr(f"ampcompare: {sentence}")
        if not quiet:
            click.echo(f"record: {outcome.cell_folder / CellFile.RECORD}", err=True)


def _show_verification(verification: ResumeVerification, *, as_json: bool) -> None:
    """Print whether a run that was stopped and resumed equals one that was not."""
    stopped = f"stopped after step {verification.step} of {verification.steps}"
    if as_json:
        print_json(asdict(verification))
    elif verification.difference:
        click.echo(f"{stopped}; the first difference: {verification.difference}")
    else:
        click.echo(
            f"{stopped} and resumed: losses, loss scales, weights, optimizer, random generators and results are those "
            "of the unbroken run to the last bit"
        )
