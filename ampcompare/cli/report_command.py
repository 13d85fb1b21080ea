"""`ampcompare report`: render records again."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["command"]


@click.command("report")
@click.argument("path", metavar="DIR|FILE")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "md", "csv", "json"]),
    default="table",
    show_default=True,
    help="what to print",
)
def command(path: str, form: str) -> int:
    """Render the records of a run directory again.

    Instead of a run directory, a single record.json or report.json can be named.
    """
    from ampcompare.compare.reload import reload_comparison
    from ampcompare.report.files import FORMATS

    click.echo(FORMATS[form]().render(reload_comparison(Path(path))), nl=False)
    return 0
