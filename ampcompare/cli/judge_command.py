"""`ampcompare judge`: verdicts on figures that someone else measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampcompare.backends.arm import same_arm
from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.cli.comparison_output import details_option, terminal_text
from ampcompare.cli.help import ARMS, COMPARISON, DATA, Command, option
from ampcompare.cli.options import json_option, margin_options, objective_option
from ampcompare.cli.output import say
from ampcompare.cli.values import ARM, FILE, Choice

if TYPE_CHECKING:
    from ampcompare.analysis.tables.columns import TableOptions
    from ampcompare.analysis.tables.csv_table import ResultsTable

__all__ = ["command"]


@click.command(
    "judge",
    cls=Command,
    examples=[
        ("A published table of ResNet-50:", "ampcompare judge --example"),
        ("Your own results, from a CSV file:", "ampcompare judge results.csv --reference O2 --margin 0.3"),
        ("From another program:", "python collect.py | ampcompare judge -"),
    ],
)
@click.argument("table", metavar="[TABLE]", required=False, type=FILE)
@option("--example", is_flag=True, group=DATA, help="a published table of ResNet-50 instead of a file")
@option(
    "--reference",
    type=ARM,
    group=ARMS,
    help="arm that the others are compared with  [default: fp32, else the first]",
)
@option(
    "--metric",
    metavar="COLUMN",
    group=DATA,
    help="column that holds the results  [default: accuracy, else a known metric]",
)
@option(
    "--better",
    type=Choice(["higher", "lower"]),
    group=DATA,
    help="direction of the metric  [default: lower for error, loss, WER and the like, else higher]",
)
@option(
    "--within",
    metavar="COLUMN",
    multiple=True,
    group=DATA,
    help="compare within each value of this setting, and over all values; repeatable",
)
@option(
    "--setting",
    metavar="COLUMN",
    multiple=True,
    group=DATA,
    help="a column whose values must be equal for runs to be compared; repeatable",
)
@margin_options
@option(
    "--sd",
    type=float,
    metavar="NUMBER",
    group=COMPARISON,
    help="published standard deviation over seeds, for arms with fewer than three runs",
)
@option(
    "--runs",
    type=int,
    metavar="N",
    group=COMPARISON,
    help="number of runs averaged in each line that has a standard deviation, such as ± 0.16",
)
@objective_option
@details_option
@json_option()
def command(table: str | None, as_json: bool, **parameters: Any) -> int:
    """Compare results that were measured elsewhere.

    The table (a CSV or Markdown file; - is standard input) has a line per run, or per mean of runs with its standard
    deviation. Its columns are arm, a metric such as accuracy and, where known, seed, sd, n, time or throughput, memory
    and diverged. A metric of NaN marks a run that diverged. Known settings such as the batch size, and other columns of
    text, must be equal for arms to be compared; other numeric columns are not judged, and the output names them.
    """
    from ampcompare.analysis.inference.criteria import Criteria
    from ampcompare.analysis.tables.columns import TableOptions
    from ampcompare.analysis.tables.external import EXAMPLE_SD, example_table, judge
    from ampcompare.report.base import FORMATS

    example, sd, within = parameters["example"], parameters["sd"], parameters["within"]
    if example == (table is not None):
        raise ConfigError("name one table, a CSV or Markdown file, or give --example")
    if example and sd is None:
        sd = EXAMPLE_SD
    options = TableOptions(parameters["metric"], parameters["better"], (*parameters["setting"], *within))
    results = example_table() if table is None else _read(table, options)
    margin = "auto" if parameters["margin"] is None else parameters["margin"]
    terms = Criteria(margin, parameters["time_margin"] / 100, parameters["objective"])
    reference = same_arm(parameters["reference"], [run.arm for run in results.runs])
    comparison = judge(results, reference=reference, sd=sd, terms=terms, within=within, runs=parameters["runs"])
    if as_json:
        say(FORMATS["json"].reporter().render(comparison), nl=False)
    else:
        say(terminal_text(comparison, details=parameters["details"]), nl=False)
    return 0


def _read(name: str, options: TableOptions) -> ResultsTable:
    """Read the table from a file, or from standard input for `-`."""
    from ampcompare.analysis.tables.csv_table import MAX_BYTES, read_table, read_table_file

    if name != "-":
        return read_table_file(Path(name), options)
    try:
        text = sys.stdin.buffer.read(MAX_BYTES + 1).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read the table -: {getattr(error, 'strerror', None) or error}") from None
    return read_table(text, name, options)
