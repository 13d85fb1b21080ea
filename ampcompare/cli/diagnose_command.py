"""`ampcompare diagnose`: where numbers overflow, what is lost, and what to keep in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ampcompare.api.diagnosis import diagnose as api_diagnose
from ampcompare.backends.arm import Arm
from ampcompare.cli.help import ARMS, MACHINE, OUTPUT, SCRIPT, option, options_of
from ampcompare.cli.launching import ended_by_signals
from ampcompare.cli.options import json_option, recipe_options
from ampcompare.cli.output import text_width
from ampcompare.cli.settings import ScriptCommand, request_from, watched_script_options
from ampcompare.cli.values import ARM, FOLDER
from ampcompare.experiment.sources import collect_settings

__all__ = ["command"]

diagnose_option = options_of(api_diagnose)


@click.command(
    "diagnose",
    cls=ScriptCommand,
    common=[
        *("--arm", "--steps", "--at", "--reference", "--cures", "--arch", "--data", "--data-dir", "--batch-size"),
        *("--lr", "--optimizer", "--recipe", "--device", "--output-dir", "--json"),
    ],
    examples=[
        ("What O2 does to the numbers of a small network:", "ampcompare diagnose --arm O2 --arch convnet"),
        ("Only ranges of values, at two steps:", "ampcompare diagnose --arm half --reference none --at 0,4"),
        ("Your own training script:", "ampcompare diagnose --arm O2 --device cpu -- train.py --epochs 1"),
    ],
)
@diagnose_option("--arm", "arm_text", parameter="arm", type=ARM, group=ARMS, help="what to diagnose")
@diagnose_option("--steps", metavar="N", group=OUTPUT)
@diagnose_option("--at", metavar="STEP,...", type=str, group=OUTPUT)
@diagnose_option("--reference", group=OUTPUT)
@diagnose_option("--cures/--no-cures", group=OUTPUT)
@watched_script_options
@diagnose_option("--rank", type=click.IntRange(0), metavar="N", group=SCRIPT, help="rank to watch")
@diagnose_option("--gpus", metavar="LIST", group=MACHINE)
@diagnose_option("--preflight/--no-preflight", group=SCRIPT)
@recipe_options
@option("--output-dir", "-o", type=FOLDER, group=OUTPUT, help="write diagnosis.json and .html into this folder")
@json_option()
def command(**parameters: Any) -> int:
    """Find where numbers overflow or are lost, and what to keep in fp32.

    Trains for some steps, repeats every operation in fp32, and tests which modules or functions must stay in fp32 to
    remove a fault. A script after -- is started again for each test. Exits with 0 whether or not there is a fault.
    """
    from ampcompare.experiment.diagnose import DiagnoseOptions, diagnose
    from ampcompare.experiment.option_checks import check_cells
    from ampcompare.experiment.preflight import preflight_of
    from ampcompare.runs.records.run import dump_json
    from ampcompare.runs.report.terminal import Terminal

    arm = str(Arm.parse(parameters["arm_text"]))
    derived = {"arm_text": arm, "processes": parameters["nproc_per_node"], "metric": ()}
    config = collect_settings(request_from({**parameters, **derived}), one_run=True).config
    options = DiagnoseOptions(
        config,
        at=_steps(parameters["at"]),
        **{name: parameters[name] for name in ("steps", "reference", "cures", "rank", "gpus")},
    )
    options.check()
    check_cells([config])

    def say(line: str) -> None:
        click.echo(f"ampcompare: {line}", err=True)

    with ended_by_signals():
        if config.script is not None and parameters["preflight"]:
            preflight_of([config], say, gpus=options.gpus)
        folder = parameters["output_dir"]
        diagnosis = diagnose(options, output_dir=Path(folder) if folder else None, say=say)
    if parameters["as_json"]:
        click.echo(dump_json(diagnosis))
        return 0
    click.echo(Terminal(text_width()).render(diagnosis), nl=False)
    return 0


def _steps(text: str | None) -> tuple[int, ...]:
    """Read the steps of `--at`.

    Raises:
        click.BadParameter: something in it is not a number.
    """
    try:
        return tuple(int(part) for part in (text or "").split(",") if part)
    except ValueError:
        raise click.BadParameter(f"{text!r} must be step numbers, as in 0,4", param_hint="--at") from None
