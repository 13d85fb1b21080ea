"""`ampcompare judge`: verdicts on figures that someone else measured."""

import io
import sys
from typing import Any

import click

from ampcompare.api.results_table import judge_table
from ampcompare.base.errors import ConfigError
from ampcompare.cli.comparison_output import details_option, terminal_text
from ampcompare.cli.help import ARMS, COMPARISON, DATA, Command, default_of, option, options_of
from ampcompare.cli.output import say
from ampcompare.cli.shared_options import json_option, margin_options
from ampcompare.cli.values import FILE

judge_option = options_of(judge_table)


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
    "--reference", metavar="ARM", group=ARMS, help="arm that others are compared with  [default: fp32, else the first]"
)
@judge_option("--metric", metavar="COLUMN", group=DATA)
@judge_option("--better", group=DATA)
@margin_options(judge_option)
@judge_option("--sd", metavar="NUMBER", group=COMPARISON)
@judge_option("--objective", group=COMPARISON)
@details_option
@json_option()
def command(table: str | None, as_json: bool, example: bool, details: bool, **options: Any) -> int:
    """Compare results that were measured elsewhere.

    The table (a CSV or Markdown file; - is standard input) has a line per run, or per mean of runs: the columns arm,
    seed, seconds and a metric such as accuracy; a mean has its standard deviation (77.01 ± 0.16, or a column named
    like the metric with sd behind it) and n, its number of runs. A metric of NaN marks a run that diverged.
    """
    from ampcompare.results.analysis.results_table import EXAMPLE, EXAMPLE_SD
    from ampcompare.results.report.base import FORMATS

    if example == (table is not None):
        raise ConfigError("name one table, a CSV or Markdown file, or give --example")
    if options["margin"] is None:
        options["margin"] = default_of(judge_table, "margin")
    if example and options["sd"] is None:
        options["sd"] = EXAMPLE_SD
    source = io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig") if table == "-" else table or EXAMPLE
    comparison = judge_table(source, **options)
    say(
        FORMATS["json"].reporter().render(comparison) if as_json else terminal_text(comparison, details=details),
        nl=False,
    )
    return 0
