"""`ampcompare run`: train one arm."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampcompare.arm import Arm
from ampcompare.cli.launching import check_slurm, count_processes, launch_options, launcher_for, sigterm_saves
from ampcompare.cli.options import output_options, recipe_options
from ampcompare.cli.output import say
from ampcompare.cli.settings import gather, published_for_run
from ampcompare.errors import ConfigError, Ended

if TYPE_CHECKING:
    from ampcompare.cli.show import Display
    from ampcompare.config import RunConfig
    from ampcompare.launch.base import Launcher

__all__ = ["arm_text", "command"]

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
@click.option("--opt-level", metavar="O0|O1|O2|O3", help="of apex  [default: O1]")
@click.option(
    "--engine", metavar="auto|nvidia|compat", help="of apex: the real Apex, or this package's own  [default: auto]"
)
@click.option("--loss-scale", metavar="dynamic|NUMBER", help="of apex and half")
@click.option("--keep-batchnorm-fp32", metavar="true|false", help="of apex at O2 and O3")
@click.option("--master-weights", metavar="true|false", help="of apex at O2 and O3, and of half")
@click.option("--cast-model-outputs", metavar="DTYPE", help="of apex")
@click.option("--min-loss-scale", metavar="NUMBER", help="of apex: floor of a dynamic scale")
@click.option("--max-loss-scale", metavar="NUMBER", help="of apex: ceiling of a dynamic scale")
@click.option("--dtype", metavar="float16|bfloat16", help="of native and half  [default: float16]")
@click.option("--bn-fp32/--no-bn-fp32", default=None, help="of half: batch norm stays in fp32")
@click.option("--init-scale", metavar="NUMBER", help="of native, and of half with a dynamic scale")
@click.option("--growth-factor", metavar="NUMBER", help="of native")
@click.option("--backoff-factor", metavar="NUMBER", help="of native")
@click.option("--growth-interval", metavar="STEPS", help="of native, and of half with a dynamic scale")
@click.option("--seed", type=int, help="of weights, order and augmentation  [default: 0]")
@click.option(
    "--verify-resume",
    is_flag=True,
    help="train without and with a stop and a checkpoint, compare to the last bit; exit with 1 if they differ",
)
@recipe_options
@launch_options
@output_options
def command(**parameters: Any) -> int:
    """Train one arm and print its row.

    Without options it trains fp32 on the embedded digits: ampcompare run --backend apex --opt-level O2
    """
    from ampcompare.cli.show import Display
    from ampcompare.compare.api import run_in
    from ampcompare.compare.summary import summarize
    from ampcompare.record import dump_json
    from ampcompare.report.base import printable
    from ampcompare.report.grid import room
    from ampcompare.report.terminal import Terminal

    parameters["arm_text"] = arm_text(parameters)
    parameters["processes"] = count_processes(parameters)
    gathered = gather(parameters, one_run=True)
    config = gathered.config
    folder = Path(parameters["output_dir"] or Path("runs") / f"run-{config.digest()}")
    if parameters["dry_run"]:
        click.echo(dump_json(config))
        return 0
    if config.saving.apex_layout and not config.arm.startswith("apex"):
        raise ConfigError(f"--apex-layout is what an Apex script saves, and the arm is {config.arm}; leave it out")
    check_slurm(parameters, {config.launcher})
    with launcher_for(config, parameters, several_cells=False) as launcher, sigterm_saves(launcher):
        display = Display(quiet=parameters["quiet"] or not launcher.speaks, bar=not parameters["no_progress"])
        if parameters["verify_resume"]:
            return _verify(config, folder / "verify-resume", launcher, display, as_json=parameters["as_json"])
        try:
            record = run_in(config, folder, launcher, force=parameters["force"], observer=display)
        except (KeyboardInterrupt, Ended):
            if remains := launcher.remains():
                display.note(remains)
            raise
        for resumption in record.resumed[-1:]:
            display.note("; ".join([f"went on from a checkpoint of step {resumption.step}", *resumption.notes]))
    if not launcher.speaks:
        if record.status == "interrupted":
            return Ended.exit_code
        return int(record.environment.get("exit_code", 3)) if record.status == "failed" else 0
    if parameters["as_json"]:
        say(dump_json(record))
    if record.status == "failed":
        log = folder / "cells" / record.cell / ("log.txt" if config.processes == 1 else "")
        error = printable(record.error or "", 2000)
        click.echo(f"ampcompare: {record.arm} failed: {error} (log: {log})", err=True)
        return int(record.environment.get("exit_code", 3))
    if record.status == "interrupted":
        raise Ended(f"{record.arm} was {record.error}; --resume auto goes on from its newest checkpoint")
    if not parameters["as_json"]:
        row = summarize([record], arms=[record.arm], reference=record.arm)
        published = published_for_run(gathered)
        say(Terminal(room()).render(row.model_copy(update={"published": published})), nl=False)
        if not parameters["quiet"]:
            click.echo(f"record: {folder / 'cells' / record.cell / 'record.json'}", err=True)
    return 0


def _verify(config: RunConfig, folder: Path, launcher: Launcher, display: Display, *, as_json: bool) -> int:
    """Say whether a run that was stopped and resumed equals one that was not."""
    from ampcompare.compare.verify_resume import verify_resume
    from ampcompare.record import dump_json

    found = verify_resume(config, folder, launcher, observer=display)
    if as_json:
        click.echo(dump_json(asdict(found)))
    elif found.difference:
        click.echo(f"stopped after step {found.step} of {found.steps}; the first difference: {found.difference}")
    else:
        click.echo(
            f"stopped after step {found.step} of {found.steps} and resumed: losses, loss scales, weights, optimizer, "
            "random generators and results are those of the unbroken run to the last bit"
        )
    return 1 if found.difference else 0


def arm_text(parameters: dict[str, Any]) -> str | None:
    """Return the arm that the flags name; None where they name none and a file may."""
    given = {name: parameters[name] for name in ARM_OPTIONS if parameters[name] is not None}
    text, backend = parameters["arm_text"], parameters["backend"]
    if text is not None:
        if backend is not None or given:
            seen = ", ".join(f"--{name.replace('_', '-')}" for name in [*(["backend"] if backend else []), *given])
            raise ConfigError(f"--arm says it all, and {seen} was given beside it; use one or the other")
        return str(Arm.parse(text))
    if backend is None:
        if not given:
            return None
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags} belongs to a backend; name it with --backend")
    return str(Arm.make(backend, **given))
