"""`ampcompare diagnose`: where numbers overflow, what is lost, and what to keep in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ampcompare.backends.arm import Arm
from ampcompare.cli.help import ARMS, OUTPUT, SCRIPT, option
from ampcompare.cli.launching import ended_by_signals, gpus_option
from ampcompare.cli.options import json_option, recipe_options
from ampcompare.cli.output import text_width
from ampcompare.cli.script_options import ScriptCommand
from ampcompare.cli.settings import request_from
from ampcompare.cli.values import ARM, FOLDER, Choice
from ampcompare.experiment.sources import collect_settings

__all__ = ["command"]


@click.command(
    "diagnose",
    cls=ScriptCommand,
    common=[
        *("--arm", "--steps", "--at", "--reference", "--cures", "--arch", "--data", "--data-dir", "--batch-size"),
        *("--lr", "--optimizer", "--recipe", "--device", "--output-dir", "--json"),
    ],
    examples=[
        ("What O2 does to the numbers of a small network:", "ampcompare diagnose --arm O2 --arch cnn"),
        ("Only ranges of values, at two steps:", "ampcompare diagnose --arm half --reference none --at 0,4"),
        ("Your own training script:", "ampcompare diagnose --arm O2 --device cpu -- train.py --epochs 1"),
    ],
)
@option("--arm", "arm_text", type=ARM, group=ARMS, default="apex:O2", show_default=True, help="what to diagnose")
@option("--steps", type=int, metavar="N", default=8, show_default=True, group=OUTPUT, help="updates of each run")
@option("--at", metavar="STEP,...", help="watch only these steps, counted from 0", group=OUTPUT)
@option(
    "--reference",
    type=Choice(("float32", "float64", "none")),
    default="float32",
    show_default=True,
    group=OUTPUT,
    help="precision in which every operation is repeated to measure its error",
)
@option(
    "--cures/--no-cures", default=True, group=OUTPUT, help="train with each candidate cure to test it  [default: on]"
)
@option(
    "--seed",
    type=int,
    metavar="N",
    group=OUTPUT,
    help="random seed of weights and batches; for a script, set before it starts",
)
@option("--seed-arg", metavar="FLAG", group=SCRIPT, help="with -- SCRIPT: pass the seed as FLAG SEED")
@option("--compat-torch", is_flag=True, group=SCRIPT, help="with -- SCRIPT: restore removed and changed APIs")
@option("--nproc-per-node", type=click.IntRange(1), metavar="N", group=SCRIPT, help="with -- SCRIPT: ranks of torchrun")
@option("--rank", type=click.IntRange(0), metavar="N", default=0, group=SCRIPT, help="rank to watch  [default: 0]")
@gpus_option
@recipe_options
@option("--output-dir", "-o", type=FOLDER, group=OUTPUT, help="write diagnosis.json and .html into this folder")
@json_option()
def command(**parameters: Any) -> int:
    """Find where numbers overflow or are lost, and what to keep in fp32.

    Trains for some steps, repeats every operation in fp32, and tests which modules or functions must stay in fp32 to
    remove a fault. A script after -- is started again for each test. Exits with 0 whether or not there is a fault.
    """
    from ampcompare.experiment.diagnose import DiagnoseOptions, diagnose
    from ampcompare.experiment.preflight import check_cells
    from ampcompare.records.run import dump_json
    from ampcompare.report.diagnosis import diagnosis_text

    arm = str(Arm.parse(parameters["arm_text"]))
    derived = {"arm_text": arm, "processes": parameters["nproc_per_node"], "metric": ()}
    config = collect_settings(request_from({**parameters, **derived}), one_run=True).config
    options = DiagnoseOptions(
        config,
        steps=parameters["steps"],
        at=_steps(parameters["at"]),
        reference=parameters["reference"],
        cures=parameters["cures"],
        rank=parameters["rank"],
        gpus=parameters["gpus"],
    )
    options.check()
    check_cells([config])
    with ended_by_signals():
        folder = parameters["output_dir"]
        diagnosis = diagnose(
            options,
            output_dir=Path(folder) if folder else None,
            say=lambda line: click.echo(f"ampcompare: {line}", err=True),
        )
    if parameters["as_json"]:
        click.echo(dump_json(diagnosis))
        return 0
    width = text_width()
    click.echo(diagnosis_text(diagnosis, width=width), nl=False)
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
