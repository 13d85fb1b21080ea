"""`ampcompare judge`: verdicts on figures that someone else measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ampcompare.errors import ConfigError, RecordError

__all__ = ["command"]


@click.command("judge")
@click.argument("table", metavar="TABLE.csv", required=False)
@click.option("--example", is_flag=True, help="a published table of ResNet-50 instead of a file")
@click.option(
    "--reference", metavar="ARM", help="what the others are compared with  [default: fp32, or else the first]"
)
@click.option("--margin", type=float, default=0.5, show_default=True, help="points of accuracy that do not matter")
@click.option(
    "--time-margin", type=float, default=2.0, show_default=True, help="percent of the time that do not matter"
)
@click.option(
    "--sd",
    type=float,
    metavar="POINTS",
    help="standard deviation over seeds that was published, for arms with fewer than three runs",
)
@click.option(
    "--prefer",
    type=click.Choice(["accuracy", "time", "memory"]),
    default="time",
    show_default=True,
    help="what a recommended arm is to gain",
)
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout instead of the table")
def command(table: str | None, as_json: bool, **parameters: Any) -> int:
    """Give verdicts on figures that someone else measured (a CSV).

    The table (- is standard input) has a line per run and the columns arm, accuracy and, where known, seed, time,
    memory and diverged; an accuracy of NaN is a run that diverged, and any further column a setting that runs must
    share to be compared.
    """
    from ampcompare.compare.judge import EXAMPLE_SD, example_table, judge
    from ampcompare.compare.table import read_table
    from ampcompare.compare.terms import Terms
    from ampcompare.report.files import FORMATS
    from ampcompare.report.grid import room
    from ampcompare.report.judged import Judged

    example, sd = parameters["example"], parameters["sd"]
    if example == (table is not None):
        raise ConfigError("name one table: a CSV file, or --example")
    if example and sd is None:
        sd = EXAMPLE_SD
    read = example_table() if table is None else read_table(_text(table), table)
    terms = Terms(parameters["margin"], parameters["time_margin"] / 100, parameters["prefer"])
    comparison = judge(read, reference=parameters["reference"], sd=sd, terms=terms)
    reporter = FORMATS["json"]() if as_json else Judged(sd, room())
    click.echo(reporter.render(comparison), nl=False)
    return 0


def _text(name: str) -> str:
    try:
        if name == "-":
            return sys.stdin.buffer.read().decode("utf-8-sig")
        return Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"cannot read the table {name}: {getattr(error, 'strerror', None) or error}") from None
