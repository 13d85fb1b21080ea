"""`ampcompare judge`: verdicts on figures that someone else measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampcompare.cli.options import margin_options, objective_option
from ampcompare.errors import ConfigError, RecordError

if TYPE_CHECKING:
    from ampcompare.analysis.csv_table import ResultsTable

__all__ = ["command"]


@click.command("judge")
@click.argument("table", metavar="TABLE.csv", required=False)
@click.option("--example", is_flag=True, help="a published table of ResNet-50 instead of a file")
@click.option(
    "--reference", metavar="ARM", help="what the others are compared with  [default: fp32, or else the first]"
)
@margin_options
@click.option(
    "--sd",
    type=float,
    metavar="POINTS",
    help="standard deviation over seeds that was published, for arms with fewer than three runs",
)
@objective_option
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout instead of the table")
def command(table: str | None, as_json: bool, **parameters: Any) -> int:
    """Compare results that were measured elsewhere (a CSV).

    The table (- is standard input) has a line per run and the columns arm, accuracy and, where known, seed, time,
    memory and diverged; an accuracy of NaN is a run that diverged, and any further column a setting that runs must
    share to be compared.
    """
    from ampcompare.analysis.criteria import Criteria
    from ampcompare.analysis.external import EXAMPLE_SD, example_table, judge
    from ampcompare.report.external import Judged
    from ampcompare.report.formats import FORMATS
    from ampcompare.report.tables import room

    example, sd = parameters["example"], parameters["sd"]
    if example == (table is not None):
        raise ConfigError("name one table: a CSV file, or --example")
    if example and sd is None:
        sd = EXAMPLE_SD
    results = example_table() if table is None else _read(table)
    margin = "auto" if parameters["margin"] is None else parameters["margin"]
    terms = Criteria(margin, parameters["time_margin"] / 100, parameters["objective"])
    comparison = judge(results, reference=parameters["reference"], sd=sd, terms=terms)
    reporter = FORMATS["json"].reporter() if as_json else Judged(sd, room())
    click.echo(reporter.render(comparison), nl=False)
    return 0


def _read(name: str) -> ResultsTable:
    """Read the table from a file, or from standard input for `-`."""
    from ampcompare.analysis.csv_table import MAX_BYTES, read_table, read_table_file

    if name != "-":
        return read_table_file(Path(name))
    try:
        text = sys.stdin.buffer.read(MAX_BYTES + 1).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read the table -: {getattr(error, 'strerror', None) or error}") from None
    return read_table(text, name)
