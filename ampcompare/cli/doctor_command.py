"""`ampcompare doctor`: what this machine offers and what is wrong with it."""

import os
from pathlib import Path

import click

from ampcompare.api.machine import examine_machine
from ampcompare.backends.arm import parse_arms
from ampcompare.base.errors import ConfigError
from ampcompare.cli.help import Command, make_option_from_signature, option
from ampcompare.cli.output import print_json, text_width
from ampcompare.cli.shared_options import json_option
from ampcompare.cli.values import FILE

COLORS = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}


@click.command(
    "doctor",
    cls=Command,
    examples=[
        ("What this machine offers, and what is wrong with it:", "ampcompare doctor"),
        ("What the imports of Apex in a script get here:", "ampcompare doctor train.py"),
        ("In a job script, before training starts:", "ampcompare doctor --for apex:O1,engine=nvidia"),
    ],
    epilog="Exit codes: 0 all checks finished; 2 usage; 4 an arm given by --for cannot run here.",
)
@option(
    "--for",
    "arms",
    multiple=True,
    metavar="ARM[,ARM...]",
    help="exit with 4 unless these arms can run here; repeatable, or comma-separated",
)
@make_option_from_signature(examine_machine)("--time-limit", type=click.FloatRange(min=1), metavar="SECONDS")
@json_option()
@click.argument("scripts", metavar="[SCRIPT]...", nargs=-1, type=FILE)
def command(arms: tuple[str, ...], as_json: bool, time_limit: float, scripts: tuple[str, ...]) -> int:
    """Check this machine and its libraries; report problems and fixes.

    It names who imports Apex: installed libraries, and each SCRIPT, a file or folder; by default the Python files of
    this folder.

    Libraries that may be broken, such as torch or Apex, are tried in a separate process, so that a crash or a hang
    becomes a line of the report. Nothing is changed.
    """
    from ampcompare.doctor.examine import examine, render_examination

    for script in scripts:
        if not os.path.exists(script):
            raise ConfigError(f"there is no file or folder {script}")
    examination = examine(parse_arms(arms), [Path(script) for script in scripts], seconds=time_limit)
    if as_json:
        print_json(examination.data())
    else:
        plain = bool(os.environ.get("NO_COLOR"))

        def color_by_verdict(word: str, verdict: str) -> str:
            return word if plain else click.style(word, COLORS[verdict])

        click.echo(render_examination(examination, width=text_width(), style=color_by_verdict), nl=False)
    return 0 if all(arm.can_run for arm in examination.arms) else 4
