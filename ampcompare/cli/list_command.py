"""`ampcompare list`: what there is to choose from, and which run directories there are."""

from __future__ import annotations

from pathlib import Path

import click

from ampcompare.cli.help import Command
from ampcompare.cli.values import FOLDER, Choice
from ampcompare.errors import ConfigError

__all__ = ["command"]

KINDS = ("arms", "models", "data", "launchers", "recipes", "guards")
RUN_HEADERS = ("folder", "changed", "tag", "arms", "seeds", "done", "headline")


@click.command(
    "list",
    cls=Command,
    examples=[
        ("Which models and data there are:", "ampcompare list models"),
        ("What has been run, the newest first:", "ampcompare list runs"),
    ],
)
@click.argument("what", type=Choice([*KINDS, "runs", "all"]), default="all")
@click.argument("folder", metavar="[FOLDER]", required=False, type=FOLDER)
def command(what: str, folder: str | None) -> int:
    """List available arms, models, data, launchers, recipes and guards.

    `list runs` shows the run directories in FOLDER, by default runs/, the newest first: when each changed, its arms and
    seeds, how many of its planned cells are done, and the headline of its report.
    """
    if what == "runs":
        return _list_runs(folder)
    if folder is not None:
        raise ConfigError(f"FOLDER is for list runs; list {what} takes none")
    from ampcompare.experiment.choices import list_choices
    from ampcompare.report.tables import listing, room

    for name, rows in list_choices().items():
        if what in (name, "all"):
            shown = [[item, "yes" if available else "no", reason] for item, available, reason in rows]
            click.echo(listing(shown, [name, "available", "what it is, or why not"], room()) + "\n")
    return 0


def _list_runs(folder: str | None) -> int:
    from ampcompare.experiment.run_list import DEFAULT_FOLDER, describe_run, find_runs
    from ampcompare.report.tables import listing, room

    root = Path(folder) if folder is not None else DEFAULT_FOLDER
    found = find_runs(root) if folder is not None or root.is_dir() else []
    if not found:
        click.echo(f"no run directories in {root.absolute()}; ampcompare compare makes one", err=True)
        return 0
    click.echo(listing([describe_run(path).row() for path in found], RUN_HEADERS, room()))
    return 0
