"""`ampcompare judge`: verdicts on figures that someone else measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ampcompare.api.results_table import judge_table
from ampcompare.backends.arm import same_arm
from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.cli.comparison_output import details_option, terminal_text
from ampcompare.cli.help import ARMS, COMPARISON, DATA, Command, default_of, option, options_of
from ampcompare.cli.options import json_option, margin_options
from ampcompare.cli.output import say
from ampcompare.cli.values import ARM, FILE

__all__ = ["command"]

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
    "--reference",
    type=ARM,
    group=ARMS,
    help="arm that the others are compared with  [default: fp32, else the first]",
)
@judge_option("--metric", metavar="COLUMN", group=DATA)
@judge_option("--better", group=DATA)
@margin_options(judge_option)
@judge_option("--sd", metavar="NUMBER", group=COMPARISON)
@judge_option("--runs", metavar="N", group=COMPARISON)
@judge_option("--objective", group=COMPARISON)
@details_option
@json_option()
def command(table: str | None, as_json: bool, **parameters: Any) -> int:
    """Compare results that were measured elsewhere.

    The table (a CSV or Markdown file; - is standard input) has a line per run, or per mean of runs: the columns arm,
    seed, seconds and a metric such as accuracy; a mean has its standard deviation (77.01 ± 0.16, or a column named
    like the metric with sd behind it) and n, its number of runs. A metric of NaN marks a run that diverged.
    """
    from ampcompare.runs.analysis.inference.criteria import Criteria
    from ampcompare.runs.analysis.results_table import EXAMPLE_SD, MAX_BYTES, example_table, judge, read_table
    from ampcompare.runs.report.base import FORMATS

    example, sd = parameters["example"], parameters["sd"]
    if example == (table is not None):
        raise ConfigError("name one table, a CSV or Markdown file, or give --example")
    columns = {"metric": parameters["metric"], "better": parameters["better"]}
    if table is None:
        results, sd = example_table(), EXAMPLE_SD if sd is None else sd
    elif table == "-":
        try:
            text = sys.stdin.buffer.read(MAX_BYTES + 1).decode("utf-8-sig")
        except (OSError, ValueError) as error:
            raise RecordError(f"cannot read the table -: {getattr(error, 'strerror', None) or error}") from None
        results = read_table(text, "-", **columns)
    else:
        results = read_table(Path(table), **columns)
    margin = default_of(judge_table, "margin") if parameters["margin"] is None else parameters["margin"]
    terms = Criteria(margin, parameters["time_margin"] / 100, parameters["objective"])
    reference = same_arm(parameters["reference"], [run.arm for run in results.runs])
    comparison = judge(results, reference=reference, sd=sd, terms=terms, runs=parameters["runs"])
    if as_json:
        say(FORMATS["json"].reporter().render(comparison), nl=False)
    else:
        say(terminal_text(comparison, details=parameters["details"]), nl=False)
    return 0
