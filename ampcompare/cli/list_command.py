"""`ampcompare list`: what there is to choose from."""

from __future__ import annotations

import click

from ampcompare.cli.help import Command
from ampcompare.cli.values import Choice

__all__ = ["command"]

KINDS = ("arms", "models", "data", "launchers", "recipes", "guards")


@click.command("list", cls=Command)
@click.argument("what", type=Choice([*KINDS, "all"]), default="all")
def command(what: str) -> int:
    """List available arms, models, data, launchers, recipes and guards."""
    from ampcompare.experiment.choices import list_choices
    from ampcompare.report.tables import listing, room

    for name, rows in list_choices().items():
        if what in (name, "all"):
            shown = [[item, "yes" if available else "no", reason] for item, available, reason in rows]
            click.echo(listing(shown, [name, "available", "what it is, or why not"], room()) + "\n")
    return 0
