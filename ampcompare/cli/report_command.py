"""`ampcompare report`: render records again, of one run directory or of several."""

from __future__ import annotations

from pathlib import Path

import click

from ampcompare.cli.comparison_output import details_option, terminal_text
from ampcompare.cli.output import say
from ampcompare.errors import ConfigError, RecordError
from ampcompare.formatting import printable
from ampcompare.report.formats import FORMATS

__all__ = ["command"]


@click.command("report")
@click.argument("paths", metavar="DIR|FILE...", nargs=-1, required=True)
@click.option(
    "--format",
    "form",
    type=click.Choice(list(FORMATS)),
    default="table",
    show_default=True,
    help="what to print",
)
@details_option
def command(paths: tuple[str, ...], form: str, details: bool) -> int:
    """Render the records of run directories again.

    Instead of a run directory, a single record.json or report.json can be named, or what `exec --record` wrote. Several
    directories of equal settings are one report. Those of different settings, such as other models or data, are a
    forest: each arm in each experiment, and its mean effect over all of them.

    Records that cannot be believed (edited, copied, of another cell) are left out and named; the exit code is then 2.
    """
    from ampcompare.legacy.record.summary import REPORT_FORMATS, is_exec_record, read_exec_record, render
    from ampcompare.report.tables import room

    of_exec = [path for path in paths if is_exec_record(Path(path))]
    if of_exec and len(paths) > 1:
        raise ConfigError(f"{of_exec[0]} is a record of exec, which is reported alone")
    if of_exec:
        if form not in REPORT_FORMATS:
            formats = ", ".join(REPORT_FORMATS)
            raise ConfigError(f"{of_exec[0]} is a record of exec, which has no {form} report; use --format {formats}")
        click.echo(render(read_exec_record(Path(of_exec[0])), form, room()), nl=False)
        return 0
    text, excluded = _report([Path(path) for path in paths], form, details=details)
    say(text, nl=False)
    for line in excluded:
        click.echo(f"ampcompare: not used: {printable(line, 2000)}", err=True)
    return RecordError.exit_code if excluded else 0


def _report(paths: list[Path], form: str, *, details: bool) -> tuple[str, list[str]]:
    """Return the report of one experiment, or the forest of several, and which records are not used."""
    from ampcompare.analysis.forest import make_forest
    from ampcompare.experiment.load import reload_comparison
    from ampcompare.experiment.load_several import reload_experiments
    from ampcompare.report.forest import render_forest
    from ampcompare.report.tables import room

    experiments = reload_experiments(paths) if len(paths) > 1 else [("", reload_comparison(paths[0]))]
    excluded = [line for _, comparison in experiments for line in comparison.excluded]
    if len(experiments) > 1:
        return render_forest(make_forest(experiments), form, room()), excluded
    comparison = experiments[0][1]
    if form == "table":
        return terminal_text(comparison, details=details), excluded
    return FORMATS[form].reporter(room()).render(comparison), excluded
