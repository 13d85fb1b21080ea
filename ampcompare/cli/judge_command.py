"""`ampcompare judge`: verdicts on figures that someone else measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampcompare.cli.comparison_output import details_option, terminal_text
from ampcompare.cli.options import margin_options, objective_option
from ampcompare.cli.output import say
from ampcompare.errors import ConfigError, RecordError

if TYPE_CHECKING:
    from ampcompare.analysis.csv_table import ResultsTable
    from ampcompare.analysis.table_columns import TableOptions

__all__ = ["command"]


@click.command("judge")
@click.argument("table", metavar="TABLE", required=False)
@click.option("--example", is_flag=True, help="a published table of ResNet-50 instead of a file")
@click.option(
    "--reference", metavar="ARM", help="what the others are compared with  [default: fp32, or else the first]"
)
@click.option("--metric", metavar="COLUMN", help="column of results  [default: accuracy, or else a known metric]")
@click.option(
    "--better",
    type=click.Choice(["higher", "lower"]),
    help="direction of the metric  [default: lower for error, loss, WER and the like, else higher]",
)
@click.option(
    "--within", metavar="COLUMN", multiple=True, help="compare inside each value of a setting, and over all of them"
)
@click.option("--setting", metavar="COLUMN", multiple=True, help="a column that runs must share to be compared")
@margin_options
@click.option(
    "--sd",
    type=float,
    help="standard deviation over seeds that was published, for arms with fewer than three runs",
)
@click.option(
    "--runs", type=int, metavar="N", help="runs behind each line that has a standard deviation, such as ± 0.16"
)
@objective_option
@details_option
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout instead of the table")
def command(table: str | None, as_json: bool, **parameters: Any) -> int:
    """Compare results that were measured elsewhere.

    The table (a CSV or Markdown file; - is standard input) has a line per run, or per mean of runs with its standard
    deviation. Its columns are arm, a metric such as accuracy and, where known, seed, sd, n, time or throughput, memory
    and diverged. A metric of NaN is a run that diverged. Known settings such as the batch size, and other columns of
    text, must be equal for arms to be compared; other numbers are not judged, which the output says.
    """
    from ampcompare.analysis.criteria import Criteria
    from ampcompare.analysis.external import EXAMPLE_SD, example_table, judge
    from ampcompare.analysis.table_columns import TableOptions
    from ampcompare.report.formats import FORMATS

    example, sd, within = parameters["example"], parameters["sd"], parameters["within"]
    if example == (table is not None):
        raise ConfigError("name one table: a CSV file, or --example")
    if example and sd is None:
        sd = EXAMPLE_SD
    options = TableOptions(parameters["metric"], parameters["better"], (*parameters["setting"], *within))
    results = example_table() if table is None else _read(table, options)
    margin = "auto" if parameters["margin"] is None else parameters["margin"]
    terms = Criteria(margin, parameters["time_margin"] / 100, parameters["objective"])
    comparison = judge(
        results, reference=parameters["reference"], sd=sd, terms=terms, within=within, runs=parameters["runs"]
    )
    if as_json:
        say(FORMATS["json"].reporter().render(comparison), nl=False)
    else:
        say(terminal_text(comparison, details=parameters["details"]), nl=False)
    return 0


def _read(name: str, options: TableOptions) -> ResultsTable:
    """Read the table from a file, or from standard input for `-`."""
    from ampcompare.analysis.csv_table import MAX_BYTES, read_table, read_table_file

    if name != "-":
        return read_table_file(Path(name), options)
    try:
        text = sys.stdin.buffer.read(MAX_BYTES + 1).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read the table -: {getattr(error, 'strerror', None) or error}") from None
    return read_table(text, name, options)
