"""`ampcompare list`: what there is to choose from, and which run directories there are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ampcompare.base.formatting import format_ranges, printable_line
from ampcompare.cli.forms import CommandForm, default_form
from ampcompare.cli.help import Command
from ampcompare.cli.values import FOLDER, WordChoice
from ampcompare.experiment.choices import CHOICES, list_choices

if TYPE_CHECKING:
    from ampcompare.experiment.run_directory import RunBrief

RUN_HEADERS = ("folder", "changed", "tag", "arms", "seeds", "done", "headline")
MAX_SHOWN = 4  # arms


LIST_RUNS = CommandForm(
    "list runs",
    frozenset({"what", "folder"}),
    lambda values: values["what"] == "runs",
    advice="write: ampcompare list runs FOLDER",
)
FORMS = (LIST_RUNS, default_form(("what",)))


@click.command(
    "list",
    cls=Command,
    forms=FORMS,
    examples=[
        ("Which models and data there are:", "ampcompare list models"),
        ("What has been run, the newest first:", "ampcompare list runs"),
    ],
)
@click.argument("what", type=WordChoice([*CHOICES, "runs", "all"]), default="all")
@click.argument("folder", metavar="[FOLDER]", required=False, type=FOLDER)
def command(asked: CommandForm, what: str, folder: str | None) -> int:
    """List arms, tasks, models, data, optimizers, runs and more.

    `list runs` shows the run directories in FOLDER, by default runs/, the newest first: when each changed, its arms and
    seeds, how many of its planned cells are done, and the headline of its report.
    """
    if asked is LIST_RUNS:
        return _print_runs(folder)
    from ampcompare.results.report.tables import listing_text, terminal_width

    for name, rows in list_choices().items():
        if what in (name, "all"):
            shown = [[item, "yes" if available else "no", reason] for item, available, reason in rows]
            click.echo(
                listing_text(shown, [name, "available", "what it is, or why not"], terminal_width()) + "\n"
            )
    return 0


def _print_runs(folder: str | None) -> int:
    from ampcompare.experiment.run_directory import DEFAULT_FOLDER, find_run_directories_newest_first
    from ampcompare.results.report.tables import listing_text, terminal_width

    root = Path(folder) if folder is not None else DEFAULT_FOLDER
    found = find_run_directories_newest_first(root) if folder is not None or root.is_dir() else []
    if not found:
        click.echo(f"no run directories in {root.absolute()}; ampcompare compare makes one", err=True)
        return 0
    click.echo(listing_text([row_of_run(run.brief()) for run in found], RUN_HEADERS, terminal_width()))
    return 0


def row_of_run(run: RunBrief) -> list[str]:
    """Return folder, date, tag, arms, seeds, cells and headline of a run directory as text that steers no terminal."""
    done, planned = run.cells
    more = f" and {len(run.arms) - MAX_SHOWN} more" if len(run.arms) > MAX_SHOWN else ""
    return [
        printable_line(str(run.path), 80),
        f"{run.changed:%Y-%m-%d %H:%M}",
        printable_line(run.tag, 30) or "-",
        printable_line(", ".join(run.arms[:MAX_SHOWN]) + more, 100) or "-",
        format_ranges(run.seeds) or "-",
        f"{done}" if planned is None else f"{done}/{planned}",
        printable_line(run.fault or run.headline, 300) or "-",
    ]
