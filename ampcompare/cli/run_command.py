"""`ampcompare run`: train one arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampcompare.backends.arm import Arm
from ampcompare.cli.comparison_output import details_option, terminal_text
from ampcompare.cli.launching import count_processes, launch_from, launch_options, save_at_signals
from ampcompare.cli.options import output_options, recipe_options
from ampcompare.cli.output import say
from ampcompare.cli.settings import request_from
from ampcompare.cli.waiting import typed_command, wait_seconds
from ampcompare.errors import ConfigError, Ended
from ampcompare.experiment.options import RunOptions
from ampcompare.experiment.sources import SettingsSources, collect_settings, published_for_run
from ampcompare.formatting import printable

if TYPE_CHECKING:
    from ampcompare.experiment.single_run import RunOutcome
    from ampcompare.experiment.verify_resume import Verification

__all__ = ["command", "sources_from"]

ARM_OPTIONS = (
    "opt_level",
    "loss_scale",
    "keep_batchnorm_fp32",
    "master_weights",
    "cast_model_outputs",
    "min_loss_scale",
    "max_loss_scale",
    "engine",
    "dtype",
    "bn_fp32",
    "init_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
)


@click.command("run")
@click.option("--backend", metavar="NAME", help="fp32, apex, native, half, or one of another package  [default: fp32]")
@click.option(
    "--arm", "arm_text", metavar="ARM", help="backend and options in one word, such as apex:O2,loss_scale=128"
)
@click.option("--opt-level", metavar="O0|O1|O2|O3", help="apex only  [default: O1]")
@click.option(
    "--engine",
    metavar="auto|nvidia|compat",
    help="apex only: the real Apex, or ampcompare's engine  [default: auto]",
)
@click.option("--loss-scale", metavar="dynamic|NUMBER", help="apex and half only")
@click.option("--keep-batchnorm-fp32", metavar="true|false", help="apex only, at O2 and O3")
@click.option("--master-weights", metavar="true|false", help="apex at O2 and O3, and half only")
@click.option("--cast-model-outputs", metavar="DTYPE", help="apex only")
@click.option("--min-loss-scale", metavar="NUMBER", help="apex only: lower bound of a dynamic loss scale")
@click.option("--max-loss-scale", metavar="NUMBER", help="apex only: upper bound of a dynamic loss scale")
@click.option("--dtype", metavar="float16|bfloat16", help="native and half only  [default: float16]")
@click.option("--bn-fp32/--no-bn-fp32", default=None, help="half only: batch norm stays in fp32")
@click.option("--init-scale", metavar="NUMBER", help="native, and half with a dynamic loss scale")
@click.option("--growth-factor", metavar="NUMBER", help="native only")
@click.option("--backoff-factor", metavar="NUMBER", help="native only")
@click.option("--growth-interval", metavar="STEPS", help="native, and half with a dynamic loss scale")
@click.option("--seed", type=int, help="random seed of weights, order and augmentation  [default: 0]")
@click.option(
    "--verify-resume",
    is_flag=True,
    help="train without and with a stop and a checkpoint, compare bit for bit; exit with 1 if they differ",
)
@details_option
@recipe_options
@launch_options
@output_options
def command(**parameters: Any) -> int:
    """Train one arm and print its row.

    Defaults to fp32 on the bundled digits. Example: ampcompare run --backend apex --opt-level O2
    """
    from ampcompare.cli.progress_display import Display
    from ampcompare.experiment.single_run import check_run, run_single, verify_single
    from ampcompare.records.run import dump_json

    as_json, quiet = parameters["as_json"], parameters["quiet"]
    sources = sources_from(parameters)
    options = RunOptions(
        config=sources.config,
        output_dir=Path(parameters["output_dir"]) if parameters["output_dir"] else None,
        force=parameters["force"],
        wait_seconds=wait_seconds(parameters["wait"]),
        launch=launch_from(parameters),
        command=typed_command(),
    )
    if parameters["dry_run"]:
        check_run(options)
        click.echo(dump_json(options.config))
        return 0
    if parameters["verify_resume"]:
        with Display(quiet=quiet, bar=not parameters["no_progress"]) as display:
            verification = verify_single(options, observer=display, while_running=save_at_signals)
        _show_verification(verification, as_json=as_json)
        return 1 if verification.difference else 0
    with Display(quiet=quiet, bar=not parameters["no_progress"]) as display:
        outcome = run_single(options, observer=display, while_running=save_at_signals)
    if outcome.is_main:
        _show_run(outcome, sources, as_json=as_json, quiet=quiet, details=parameters["details"])
    return outcome.exit_code


def sources_from(parameters: Mapping[str, Any]) -> SettingsSources:
    """Return the settings of the one arm that the parameters of the command ask for.

    Raises:
        ConfigError: settings that cannot be used.
    """
    derived = {"arm_text": _arm_text(parameters), "processes": count_processes(parameters)}
    return collect_settings(request_from({**parameters, **derived}), one_run=True)


def _show_run(outcome: RunOutcome, sources: SettingsSources, *, as_json: bool, quiet: bool, details: bool) -> None:
    """Print the row of a run or the record as JSON, and the error of one that failed.

    Raises:
        Ended: the run was asked to stop.
    """
    from ampcompare.analysis.summary import summarize
    from ampcompare.records.run import dump_json

    record = outcome.record
    if as_json:
        say(dump_json(record))
    if record.status == "failed":
        error = printable(record.error or "", 2000)
        click.echo(f"ampcompare: {record.arm} failed: {error} (log: {outcome.log})", err=True)
    elif record.status == "interrupted":
        raise Ended(f"{record.arm} was {record.error}; --resume auto continues from its newest checkpoint")
    elif not as_json:
        row = summarize([record], arms=[record.arm], reference=record.arm)
        published = published_for_run(sources)
        say(terminal_text(row.model_copy(update={"published": published}), details=details), nl=False)
        if not quiet:
            click.echo(f"record: {outcome.folder / 'cells' / record.cell / 'record.json'}", err=True)


def _show_verification(verification: Verification, *, as_json: bool) -> None:
    """Print whether a run that was stopped and resumed equals one that was not."""
    from ampcompare.records.run import dump_json

    stopped = f"stopped after step {verification.step} of {verification.steps}"
    if as_json:
        click.echo(dump_json(asdict(verification)))
    elif verification.difference:
        click.echo(f"{stopped}; the first difference: {verification.difference}")
    else:
        click.echo(
            f"{stopped} and resumed: losses, loss scales, weights, optimizer, random generators and results are those "
            "of the unbroken run to the last bit"
        )


def _arm_text(parameters: Mapping[str, Any]) -> str | None:
    """Return the arm that the flags name, if any; otherwise a file may name one."""
    given = {name: parameters[name] for name in ARM_OPTIONS if parameters[name] is not None}
    text, backend = parameters["arm_text"], parameters["backend"]
    if text is not None:
        if backend is not None or given:
            others = ", ".join(f"--{name.replace('_', '-')}" for name in [*(["backend"] if backend else []), *given])
            raise ConfigError(f"--arm cannot be combined with {others}; use one or the other")
        return str(Arm.parse(text))
    if backend is None:
        if not given:
            return None
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags} belongs to a backend; name it with --backend")
    return str(Arm.make(backend, **given))
