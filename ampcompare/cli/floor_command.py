"""`ampcompare floor`: how far a script's losses move by roundings alone."""

from __future__ import annotations

from pathlib import Path

import click

from ampcompare.base.files.write import write_atomically
from ampcompare.base.option_rules import OptionRule
from ampcompare.cli.help import COMPARISON, OUTPUT, option
from ampcompare.cli.launching import leave_block_at_signals
from ampcompare.cli.output import print_folded_on_stderr
from ampcompare.cli.settings import ScriptCommand
from ampcompare.cli.values import FILE

NEEDS_SCRIPT = OptionRule(
    "floor",
    "needs a script",
    "write: ampcompare floor [OPTIONS] -- SCRIPT ARGS...",
    lambda values: values["script"] is None,
)


@click.command(
    "floor",
    cls=ScriptCommand,
    rules=(NEEDS_SCRIPT,),
    examples=[
        ("The floor of a script, for CI:", "ampcompare floor -o floor.json -- train.py --epochs 1"),
        ("The floor of its first steps:", "ampcompare floor --steps 50 -o floor.json -- train.py"),
    ],
)
@option(
    "--steps",
    type=click.IntRange(1),
    metavar="N",
    group=COMPARISON,
    help="steps of each twin  [default: all]",
)
@option(
    "--seed",
    type=int,
    default=0,
    metavar="N",
    group=COMPARISON,
    help="random seed, set before the script starts",
)
@option("--output", "-o", type=FILE, default="floor.json", group=OUTPUT, help="file for the envelope")
def command(script: list[str] | None, steps: int | None, seed: int, output: str) -> int:
    """Find how far a script's losses move by roundings alone.

    Trains the script and twins of it, and writes how far apart they are. The twins differ by roundings alone: first
    weights that are changed by one unit in the last place, two threads, oneDNN switched off, deterministic kernels, and
    nothing at all. `judge STEPS --against FILE` then tells whether other steps are of the same training.
    """
    from ampcompare.base.environment.extras import require_torch
    from ampcompare.experiment.floor import measure_floor
    from ampcompare.settings.script import script_config

    assert script is not None
    require_torch()
    with leave_block_at_signals():
        envelope = measure_floor(script_config(script), seed=seed, steps=steps, say=print_folded_on_stderr)
    write_atomically(Path(output), envelope.to_json())
    click.echo(f"floor: {output}; judge other steps by it: ampcompare judge STEPS --against {output}")
    return 0
