"""`ampcompare judge`: verdicts on figures that someone else measured."""

import io
import os
import sys
from pathlib import Path
from typing import Any

import click

from ampcompare.api.results_table import judge_against, judge_table
from ampcompare.base.errors import AmpCompareError, UnusableInput
from ampcompare.base.option_rules import OptionRule, Values, is_option_given, rule_of_need
from ampcompare.cli.comparison_output import details_option
from ampcompare.cli.forms import (
    CommandForm,
    default_form,
    form_asked_by_parameter,
    form_asked_for,
    refuse_given_parameters,
)
from ampcompare.cli.help import (
    ARMS,
    COMPARISON,
    DATA,
    Command,
    default_of_parameter,
    environment_variable_of_option,
    make_option_from_signature,
    option,
)
from ampcompare.cli.output import print_document, print_json
from ampcompare.cli.shared_options import json_option, margin_options
from ampcompare.cli.values import FILE

judge_option = make_option_from_signature(judge_table)
GATES = ("--against", "--logprobs")
VARIABLE = environment_variable_of_option("judge", "--against")


OF_TABLES = ("metric", "better", "margin", "sd")
LOGPROBS = form_asked_by_parameter("--logprobs A B", "logprobs", ("twin", "as_json"))
AGAINST = form_asked_by_parameter("--against OLD", "old", (*OF_TABLES, "table", "arm", "as_json"))
TABLE = default_form(
    (*OF_TABLES, "table", "example", "reference", "time_margin", "objective", "details", "as_json")
)
FORMS = (LOGPROBS, AGAINST, TABLE)


def _lacks_one_table(values: Values) -> bool:
    if values["old"] is not None or values["logprobs"] is not None:
        return False
    return bool(values["example"]) == is_option_given(values["table"])


RULES = (
    rule_of_need(
        "--against OLD", "old", "new results", "table", advice="name them: ampcompare judge NEW --against OLD"
    ),
    OptionRule(
        "judge",
        "needs one table",
        "name a CSV or Markdown file, or give --example",
        _lacks_one_table,
    ),
)


class _JudgeCommand(Command):
    """Ends with 64 where `--against` is given and its input cannot be used: 1 and 2 are answers then."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        is_gate = VARIABLE in os.environ or any(word.partition("=")[0] in GATES for word in args)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            if not is_gate:
                raise
            raise UnusableInput(error.format_message()) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (AmpCompareError, click.UsageError) as error:
            if form_asked_for(FORMS, ctx.params) is TABLE or error.exit_code not in (1, 2):
                raise
            raise UnusableInput(
                error.format_message() if isinstance(error, click.UsageError) else str(error)
            ) from error


@click.command(
    "judge",
    cls=_JudgeCommand,
    forms=FORMS,
    rules=RULES,
    examples=[
        ("A published table of ResNet-50:", "ampcompare judge --example"),
        ("Your own results, from a CSV file:", "ampcompare judge results.csv --reference O2 --margin 0.3"),
        (
            "Is a change worse? 0 no, 1 yes, 2 cannot tell:",
            "ampcompare judge runs/new --against runs/old --margin 0.5",
        ),
    ],
    epilog="Exit codes: 0 done; 2 usage, or a table that cannot be read. With --against: 0 no worse; 1 worse; 2 cannot "
    "tell; 64 usage, or results that cannot be read, with nothing on stdout; 4 a package is missing.",
)
@click.argument("table", metavar="[TABLE]", required=False, type=FILE)
@option("--example", is_flag=True, group=DATA, help="a published table of ResNet-50 instead of a file")
@option(
    "--reference",
    metavar="ARM",
    group=ARMS,
    help="arm that others are compared with  [default: script, else fp32, else the first]",
)
@make_option_from_signature(judge_against)("--against", "old", metavar="OLD", type=FILE, group=COMPARISON)
@make_option_from_signature(judge_against)("--arm", metavar="ARM", group=ARMS)
@option(
    "--logprobs",
    nargs=2,
    type=FILE,
    metavar="A B",
    group=DATA,
    help="two files of log-probabilities of the same tokens, in place of a table",
)
@option(
    "--twin",
    type=FILE,
    metavar="FILE",
    group=COMPARISON,
    help="with --logprobs: those of A after a harmless change",
)
@judge_option("--metric", metavar="COLUMN", group=DATA)
@judge_option("--better", group=DATA)
@margin_options(judge_option)
@judge_option("--sd", metavar="NUMBER", group=COMPARISON)
@judge_option("--objective", group=COMPARISON)
@details_option
@json_option()
def command(
    asked: CommandForm,
    table: str | None,
    as_json: bool,
    example: bool,
    details: bool,
    old: str | None,
    arm: str | None,
    logprobs: tuple[str, str] | None,
    twin: str | None,
    **options: Any,
) -> int:
    """Compare results that were measured elsewhere.

    The table (a CSV or Markdown file; - is standard input) has a line per run, or per mean of runs: the columns arm,
    seed, seconds and a metric such as accuracy; a mean has its standard deviation (77.01 ± 0.16, or a column named
    like the metric with sd behind it) and n, its number of runs. A metric of NaN marks a run that diverged.

    With --logprobs A B [--twin C] the answer is one line of JSON and the exit code, as with --against: whether B is
    farther from A than C is, which is A after a harmless change.

    With --against OLD both are a table, a run directory or a report.json, and the answer is the exit code and one line
    of JSON: verdict, effect, interval, and the seeds that are still needed.
    """
    if asked is LOGPROBS:
        assert logprobs is not None
        return _print_judgment_of_logprobs(logprobs, twin)
    from ampcompare.results.analysis.results_table import EXAMPLE, EXAMPLE_SD
    from ampcompare.results.report.documents.comparison import comparison_document

    if options["margin"] is None:
        options["margin"] = default_of_parameter(judge_table, "margin")
    if asked is AGAINST:
        assert old is not None
        return _print_judgment_against_old(table, old, arm, options)
    if example and options["sd"] is None:
        options["sd"] = EXAMPLE_SD
    source = io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig") if table == "-" else table or EXAMPLE
    comparison = judge_table(source, **options)
    print_document(comparison_document(comparison), "json" if as_json else "table", details=details)
    return 0


def _print_judgment_of_logprobs(files: tuple[str, str], twin: str | None) -> int:
    """Print one line of JSON, and return the exit code that is the answer."""
    from ampcompare.results.analysis.logprobs import judge_logprobs

    result = judge_logprobs(*files, twin)
    print_json(result.data(), indent=None)
    return result.exit_code


def _print_judgment_against_old(table: str | None, old: str, arm: str | None, options: dict[str, Any]) -> int:
    """Print one line of JSON, and return the exit code that is the answer."""
    from ampcompare.experiment.floor import read_losses_and_gradient_norms
    from ampcompare.results.analysis.floor import is_envelope, judge_step_rows, read_envelope

    if is_envelope(Path(old)):
        refuse_given_parameters(
            (*OF_TABLES, "arm"), "is not for an envelope of `ampcompare floor`", "leave it out"
        )
        judgment = judge_step_rows(
            read_losses_and_gradient_norms(Path(table or "")), read_envelope(Path(old))
        )
        print_json(judgment.data(), indent=None)
        return judgment.exit_code
    kept = {name: options[name] for name in ("metric", "better", "margin", "sd")}
    assert table is not None
    new = io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig") if table == "-" else table
    result = judge_against(new, old, arm=arm, **kept)
    print_json(result.data(), indent=None)
    return result.exit_code
