"""`ampcompare exec`: run an unmodified legacy script on ampcompare's engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampcompare.backends.arm import Arm
from ampcompare.backends.script_arms import engine_in_script
from ampcompare.base.environment.variables import CELL_FOLDER
from ampcompare.base.errors import ConfigError
from ampcompare.base.option_rules import OptionRule, refusal_sentence, rule_of_need
from ampcompare.cli.forms import CommandForm, default_form, form_asked_by_parameter, refuse_given_parameters
from ampcompare.cli.help import Command, make_option_from_signature, option
from ampcompare.cli.output import text_width
from ampcompare.cli.values import FILE, LEVEL, WordChoice
from ampcompare.script.invocation.exec_settings import (
    OF_KEPT_STEP,
    ExecSettings,
    exec_fields_for_resume_check,
    settings_of_kept_step,
)

if TYPE_CHECKING:
    from ampcompare.script.invocation.target import Target

exec_option = make_option_from_signature(ExecSettings)
IN_EACH = ("script", "arguments", "module", "device", "compat_torch")
OF_RUNS = ("seed", "shift_seeds", "twin", "first_weights", "max_steps", "record", "ledger", "autocast_lists")


def _is_stack_asked_for(values: Mapping[str, Any]) -> bool:
    """Return whether a call asks for a script in another environment."""
    return bool(values["stacks"]) or "@" in (values["arm"] or "")


VERIFY_RESUME = form_asked_by_parameter(
    "--verify-resume STEP",
    "verify_resume",
    (*IN_EACH, "arm", "engine", "seed", "autocast_lists", "resume_args", "fault"),
    ", which runs the script by itself, in this environment",
)
KEEP_STEP = form_asked_by_parameter(
    "--capsule STEP",
    "capsule",
    ("script", "arguments", "module", *OF_KEPT_STEP),
    ", which keeps a step of the script as it is, in this environment",
)
IN_STACK = CommandForm(
    "--stack",
    frozenset({*IN_EACH, *OF_RUNS, "arm", "stacks"}),
    _is_stack_asked_for,
    ", whose environment has its own",
)
UNDER_ARM = CommandForm(
    "--arm ARM",
    frozenset({*IN_EACH, *OF_RUNS, "arm", "engine", "guards", "guard_passes"}),
    lambda values: values["arm"] is not None or (values["ledger"] and values["opt_level"] is None),
    ", which sets it",
    "--arm O2 sets the level, --arm script trains the script as it is",
)
AS_IT_IS = default_form(
    (*IN_EACH, "engine", "opt_level", "record", "autocast_lists", "guards", "guard_passes")
)
FORMS = (VERIFY_RESUME, KEEP_STEP, IN_STACK, UNDER_ARM, AS_IT_IS)
RULES = (
    rule_of_need("--shift-seeds", "shift_seeds", "--seed N", "seed", because=", whose offset it adds"),
    OptionRule(
        "--guard-passes N",
        "is not for --no-guards",
        "give only one of them",
        lambda values: values["guard_passes"] is not None and values["guards"] == "off",
    ),
    OptionRule(
        "--verify-resume STEP",
        "is not for an arm of a stack",
        "leave @ out: it runs the script in this environment",
        lambda values: values["verify_resume"] is not None and _is_stack_asked_for(values),
    ),
)
USAGE = 2  # the exit code of argparse and click for an argument that they do not know


@click.command(
    "exec",
    cls=Command,
    forms=FORMS,
    rules=RULES,
    examples=[
        ("A legacy script, unchanged:", "ampcompare exec train.py --epochs 1"),
        (
            "On a laptop, with a record of each step:",
            "ampcompare exec --device cpu --record r.jsonl train.py",
        ),
        (
            "Does it resume exactly:",
            "ampcompare exec --verify-resume 20 --resume-args '-r {checkpoint}' train.py",
        ),
    ],
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: the script's own; 2 no such script or module; 3 no step was kept; 4 the environment cannot run "
    "these options. With --verify-resume: 0 it resumes exactly; 1 it does not; 3 it failed.",
)
@exec_option("--engine", type=WordChoice(["compat", "nvidia"]))
@exec_option("--opt-level", type=LEVEL)
@exec_option("--arm", metavar="ARM")
@option(
    "--stack",
    "stacks",
    multiple=True,
    metavar="NAME=COMMAND",
    help="another environment, by what starts its Python, for --arm script@NAME: old=/envs/old/bin/python",
)
@exec_option("--seed", metavar="N")
@exec_option("--shift-seeds", metavar="global|all")
@exec_option("--twin")
@exec_option("--first-weights", type=FILE)
@exec_option("--max-steps", type=click.IntRange(1), metavar="N")
@exec_option("--record", type=FILE)
@exec_option("--ledger")
@exec_option("--device", type=WordChoice(["cpu"]))
@exec_option("--autocast-lists", type=WordChoice(["cuda", "cpu"]))
@exec_option("--compat-torch")
@option("--strict-guards", "guards", flag_value="strict", help="treat mistakes in the use of amp as errors")
@option("--no-guards", "guards", flag_value="off", help="do not check for mistakes in the use of amp")
@exec_option("--guard-passes", type=click.IntRange(1), metavar="N")
@option(
    "--verify-resume",
    type=click.IntRange(1),
    metavar="STEP",
    help="stop the script once it has saved at or behind STEP, start it again, and compare with a run without a break",
)
@option(
    "--resume-args",
    metavar="ARGS",
    help="added to the script's arguments when it is started again: {checkpoint} is the file that it saved last, "
    "{folder} its folder",
)
@option(
    "--fault",
    type=WordChoice(["kill"]),
    help="with --verify-resume: also kill the script while it saves, at 20 points, and start it from what each leaves",
)
@option(
    "--capsule",
    type=click.IntRange(0),
    metavar="STEP",
    help="keep this step in capsule.pt for `ampcompare replay`: weights, optimizer state, batch, generators",
)
@option("--module", "-m", is_flag=True, help="SCRIPT is the name of a module, as with python -m")
@click.argument("script", metavar="SCRIPT", type=FILE)
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    asked: CommandForm,
    module: bool,
    ledger: bool,
    verify_resume: int | None,
    resume_args: str | None,
    fault: str | None,
    capsule: int | None,
    script: str,
    arguments: tuple[str, ...],
    stacks: tuple[str, ...],
    **options: Any,
) -> int:
    """Run an unmodified Apex script on ampcompare.apex.

    Everything after SCRIPT is passed to the script. With several processes:
    torchrun --nproc-per-node 2 -m ampcompare exec SCRIPT
    """
    call = ScriptCall(script, (*_local_rank_arguments(), *arguments), module)
    if asked is VERIFY_RESUME:
        assert verify_resume is not None
        how = (verify_resume, resume_args, fault is not None)
        return _verify_resume(how, call, options)
    if asked is KEEP_STEP:
        assert capsule is not None
        return _run_script_keeping_capsule(capsule, call, options)
    if asked is IN_STACK:
        return _run_script_in_stack(stacks, call.python_arguments, ledger=ledger, **options)
    if asked is UNDER_ARM and options["arm"] is None:
        options["arm"] = "script"
    status = _run_script_here(call, ledger, options)
    if status == USAGE and (stray := _find_exec_option_among(call.arguments)) is not None:
        click.echo(
            f"ampcompare: {stray} comes after the script, so it was passed to the script; an option of ampcompare "
            f"comes before it: ampcompare exec {stray} ... {script}",
            err=True,
        )
    return status


@dataclass(frozen=True)
class ScriptCall:
    """A script as the command line names it: a file, or a module as with `python -m`."""

    script: str
    arguments: tuple[str, ...]
    is_module: bool

    @property
    def python_arguments(self) -> list[str]:
        """What comes after `python` to start it."""
        return [*(["-m"] if self.is_module else []), self.script, *self.arguments]

    @property
    def target(self) -> Target:
        """What `execute` runs."""
        from ampcompare.script.invocation.target import target_of

        return target_of(self.script, list(self.arguments), is_module=self.is_module)


def _local_rank_arguments() -> list[str]:
    """Return the script's --local-rank, which torch.distributed.launch puts before the command."""
    parent = click.get_current_context().parent
    local_rank = parent.params.get("local_rank") if parent is not None else None
    return [] if local_rank is None else [f"--local-rank={local_rank}"]


def _run_script_here(call: ScriptCall, ledger: bool, options: dict[str, Any]) -> int:
    """Run a script in this process, write what was seen of it to stderr, and return its exit code."""
    from ampcompare.base.environment.extras import require_torch

    require_torch()
    from ampcompare.results.analysis.pairing.declared import roles_and_changes_by_update_option
    from ampcompare.script.process.execute import execute

    arm = options["arm"]
    is_cell = CELL_FOLDER in os.environ  # whose record the parent reads
    looks = ledger or (
        arm is not None and not is_cell and bool(roles_and_changes_by_update_option(Arm.parse(arm)))
    )
    watch = arm is not None and options["record"] is not None
    settings = _settings_of_call(
        options, ledger=looks, watch=watch, name=call.script, arguments=call.arguments
    )
    target = call.target
    if arm is None:
        status = execute(target, settings)
    else:
        from ampcompare.script.arm_process import run_script

        status = run_script(target, settings)
    is_first = os.environ.get("RANK", "0") == "0"
    if options["shift_seeds"] is not None and not is_cell and is_first:
        _say_shifted_seeds()
    if looks and is_first:
        _say_ledger_or_ineffective_options(Arm.parse(arm), whole=ledger)
    return status


def _settings_of_call(options: Mapping[str, Any], **others: Any) -> ExecSettings:
    """Return how a script is run, from the options of a call and other fields.

    Paths are absolute: the script may change its folder, and processes that it starts run in others.
    """
    fields = {
        **options,
        "guards": options["guards"] or ExecSettings.guards,
        "engine": _engine_of_call(options),
    }
    for name in ("record", "first_weights"):
        fields[name] = None if options[name] is None else os.path.abspath(options[name])
    return ExecSettings(**fields, **others)


def _engine_of_call(options: Mapping[str, Any]) -> str:
    """Return what the script is to import as `apex`: the engine that the arm names, or that of --engine.

    Raises:
        ConfigError: both are given, and differ.
    """
    given = str(options["engine"])
    if options["arm"] is None or "engine" not in (arm := Arm.parse(options["arm"])).options:
        return given
    if (named := engine_in_script(arm)) != given:
        refuse_given_parameters(("engine",), f"is not for arm {arm}, which names its own", "leave it out")
    return named


def _verify_resume(how: tuple[int, str | None, bool], call: ScriptCall, options: dict[str, Any]) -> int:
    """Verify that a script resumes, and return the exit code."""
    from ampcompare.base.environment.extras import require_torch

    require_torch()
    from ampcompare.experiment.script_resume import ResumeCheck, verify_script_resume

    target = call.target
    options["engine"] = _engine_of_call(options)
    settings = exec_fields_for_resume_check(options, target.name, target.arguments)
    return verify_script_resume(settings, ResumeCheck(*how), is_module=target.is_module, say=click.echo)


def _run_script_keeping_capsule(step: int, call: ScriptCall, options: dict[str, Any]) -> int:
    """Run a script as it is, keep one of its steps, and return its exit code."""
    from ampcompare.base.environment.extras import require_torch

    require_torch()
    from ampcompare.script.replay.keep import keep_step_in_capsule

    target = call.target
    settings = settings_of_kept_step(options, target.name, target.arguments)
    return keep_step_in_capsule(target, settings, step, Path("capsule.pt").absolute())


def _run_script_in_stack(stacks: tuple[str, ...], words: list[str], *, ledger: bool, **options: Any) -> int:
    """Run a script in the stack that its arm names, and return its exit code."""
    from ampcompare.settings.stack import arms_with_stacks, parse_stacks

    known = parse_stacks(stacks)
    arms = arms_with_stacks([options["arm"] or ""], known) if options["arm"] else []
    arm, stack = arms[0] if len(arms) == 1 else ("", None)
    if stack is None or len(known) != 1:
        name = next(iter(known), "old")
        advice = f"give --stack {name}=COMMAND and --arm script@{name}"
        raise ConfigError(
            refusal_sentence("--stack", "needs one arm that trains there, and is given once", advice)
        )
    from ampcompare.base.environment.extras import require_torch

    require_torch()
    from ampcompare.experiment.launch.script.stacks import run_script_in_stack
    from ampcompare.script.recording.summary import read_exec_record, summary_text

    settings = _settings_of_call({**options, "arm": arm}, ledger=ledger)
    code = run_script_in_stack(stack, settings, words)
    if options["record"] is not None and os.path.exists(options["record"]):
        summary = read_exec_record(Path(options["record"]))
        click.echo(
            f"ampcompare: {summary_text(summary)}; for more: ampcompare report {options['record']}", err=True
        )
    return code


def _say_shifted_seeds() -> None:
    """Write which seeds of a script have an offset to stderr."""
    from ampcompare.results.analysis.pairing.seeding import seed_line_texts
    from ampcompare.script.arm_process import recorded_seed_calls

    calls = recorded_seed_calls()
    for words, found in (
        ("seeds shifted", [call for call in calls if call.used]),
        ("seeds as written", [call for call in calls if call.seed and not call.used]),
    ):
        if found:
            click.echo(f"ampcompare: {words}: {', '.join(seed_line_texts(found))}", err=True)


def _say_ledger_or_ineffective_options(arm: Arm, *, whole: bool) -> None:
    """Write the ledger of a script, or which options had no effect, to stderr, since its output is its own."""
    from ampcompare.results.analysis.pairing.declared import ineffective_option_sentences
    from ampcompare.results.report.documents.ledger import ledger_document
    from ampcompare.results.report.terminal import Terminal
    from ampcompare.script.arm_process import end_and_find_script_ledger

    found = end_and_find_script_ledger()
    if whole and found is None:
        click.echo("ampcompare: no step of an optimizer was seen, so that there is no ledger", err=True)
    elif whole and found is not None:
        click.echo(
            Terminal(text_width(), details=True).document_text(ledger_document(found, arm)),
            nl=False,
            err=True,
        )
    for sentence in () if whole or found is None else ineffective_option_sentences(arm, found):
        click.echo(f"ampcompare: {sentence}", err=True)


def _find_exec_option_among(arguments: tuple[str, ...]) -> str | None:
    """Return the first argument of a script that has the name of an option of this command."""
    own = {
        flag
        for param in click.get_current_context().command.params
        for flag in param.opts
        if flag[:2] == "--"
    }
    return next((word for word in arguments if word.partition("=")[0].replace("_", "-") in own), None)
