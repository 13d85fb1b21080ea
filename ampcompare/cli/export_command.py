"""`ampcompare export`: hand finished records to a tracker of experiments."""

from pathlib import Path

import click

from ampcompare.base.formatting import format_count, printable_line
from ampcompare.cli.comparison_output import say_unused_records
from ampcompare.cli.help import OUTPUT, Command, option
from ampcompare.cli.values import FILE, FOLDER, WordChoice
from ampcompare.results.report.export import TRACKERS


@click.command(
    "export",
    cls=Command,
    examples=[
        ("The newest run, for W&B, offline:", "ampcompare export --to wandb"),
        ("One run, into an MLflow store:", "ampcompare export runs/first --to mlflow -o mlruns"),
    ],
)
@click.argument("run", metavar="[DIR]", required=False, type=FILE)
@option(
    "--to",
    "tracker",
    type=WordChoice(list(TRACKERS)),
    required=True,
    group=OUTPUT,
    help="the tracker",
)
@option("--output", "-o", type=FOLDER, group=OUTPUT, help="folder for its files  [default: DIR/TRACKER]")
@option(
    "--project",
    default="ampcompare",
    show_default=True,
    metavar="NAME",
    group=OUTPUT,
    help="W&B project or MLflow experiment",
)
def command(run: str | None, tracker: str, output: str | None, project: str) -> int:
    """Export the runs of a run directory to TensorBoard, W&B or MLflow.

    Every cell becomes a run with its settings, the curve of each step, evaluations, and its summary. Without a name,
    the newest run directory in runs/ is exported. Runs that already exist there are not changed.

    W&B writes offline, for `wandb sync`, unless WANDB_MODE says otherwise. MLflow writes files, unless
    MLFLOW_TRACKING_URI names a server.
    """
    from ampcompare.api.comparison import export_run_directory
    from ampcompare.experiment.run_directory import require_run_directories_newest_first

    folder = require_run_directories_newest_first()[0] if run is None else Path(run)

    def note(text: str) -> None:
        click.echo(f"note: {printable_line(text, 2000)}", err=True)

    comparison, destination = export_run_directory(folder, tracker, output, project, note)
    count = format_count(len(comparison.records), "record")
    click.echo(f"{printable_line(str(folder), 300)}: {count}, in {printable_line(destination, 300)}")
    return say_unused_records(comparison)
