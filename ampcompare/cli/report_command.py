"""`ampcompare report`: render records again."""

from __future__ import annotations

from pathlib import Path

import click

from ampcompare.errors import ConfigError

__all__ = ["command"]


@click.command("report")
@click.argument("path", metavar="DIR|FILE")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "md", "csv", "json", "html", "latex"]),
    default="table",
    show_default=True,
    help="what to print",
)
def command(path: str, form: str) -> int:
    """Render the records of a run directory again.

    Instead of a run directory, a single record.json or report.json can be named, or what `exec --record` wrote.
    """
    from ampcompare.legacy.summary import is_exec_record, read_exec_record, render
    from ampcompare.report.files import FORMATS
    from ampcompare.report.grid import room
    from ampcompare.report.terminal import Terminal

    if is_exec_record(Path(path)):
        if form == "latex":
            raise ConfigError("what exec recorded has no LaTeX table; take --format md or csv")
        click.echo(render(read_exec_record(Path(path)), form, room()), nl=False)
        return 0
    from ampcompare.compare.reload import reload_comparison

    reporter = Terminal(room()) if form == "table" else FORMATS[form]()
    click.echo(reporter.render(reload_comparison(Path(path))), nl=False)
    return 0
