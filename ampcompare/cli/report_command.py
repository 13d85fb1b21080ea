"""`ampcompare report`: render records again."""

from __future__ import annotations

from pathlib import Path

import click

from ampcompare.errors import ConfigError, RecordError
from ampcompare.report.formats import FORMATS

__all__ = ["command"]


@click.command("report")
@click.argument("path", metavar="DIR|FILE")
@click.option(
    "--format",
    "form",
    type=click.Choice(list(FORMATS)),
    default="table",
    show_default=True,
    help="what to print",
)
def command(path: str, form: str) -> int:
    """Render the records of a run directory again.

    Instead of a run directory, a single record.json or report.json can be named, or what `exec --record` wrote.

    Records that cannot be believed (edited, copied, of another cell) are left out and named; the exit code is then 2.
    """
    from ampcompare.legacy.record.summary import REPORT_FORMATS, is_exec_record, read_exec_record, render
    from ampcompare.report.tables import room

    if is_exec_record(Path(path)):
        if form not in REPORT_FORMATS:
            formats = ", ".join(REPORT_FORMATS)
            raise ConfigError(f"{path} is a record of exec, which has no {form} report; use --format {formats}")
        click.echo(render(read_exec_record(Path(path)), form, room()), nl=False)
        return 0
    from ampcompare.experiment.load import reload_comparison

    comparison = reload_comparison(Path(path))
    click.echo(FORMATS[form].reporter(room()).render(comparison), nl=False)
    for text in comparison.excluded:
        click.echo(f"not used: {text}", err=True)
    return RecordError.exit_code if comparison.excluded else 0
