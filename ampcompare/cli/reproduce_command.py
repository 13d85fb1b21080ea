"""`ampcompare reproduce`: small versions of published claims."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from ampcompare.errors import ConfigError

__all__ = ["command"]


@click.command("reproduce")
@click.argument("study", type=click.Choice(["seeds"]))
@click.argument("names", metavar="[CLAIM]...", nargs=-1)
@click.option("--list", "only_list", is_flag=True, help="name the claims, and run nothing")
@click.option(
    "--budget", default="15m", show_default=True, metavar="TIME", help="begin no seed after so much wall time"
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="cells at the same time; no times are judged then",
)
@click.option("--output-dir", "-o", metavar="DIR", help="where records and reports go  [default: runs/reproduce-STUDY]")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout instead of the table")
@click.option("--no-progress", is_flag=True, help="no progress bar")
@click.option("--quiet", "-q", is_flag=True, help="no progress and no notes on stderr")
def command(study: str, names: tuple[str, ...], **parameters: Any) -> int:
    """Run small versions of published claims, each with a verdict.

    Each claim is tried on a small shape with five seeds or more, on the bundled data. What needs a GPU says so where
    there is none. Running the same command again goes on where it stopped. CLAIM is a name of --list; all by default.
    """
    from ampcompare.cli.show import Display
    from ampcompare.compare.claims import load_study
    from ampcompare.compare.duration import parse_duration
    from ampcompare.compare.reproduce import chosen, reproduce, sees_gpu
    from ampcompare.compare.told import claim_table, findings_data, render_markdown, render_text
    from ampcompare.config import RunConfig
    from ampcompare.launch.factory import make_launcher
    from ampcompare.launch.several import Several
    from ampcompare.record import dump_json, write_atomically
    from ampcompare.report.files import write_reports

    read = load_study(study)
    claims = chosen(read, names)
    if parameters["only_list"]:
        click.echo(claim_table(claims), nl=False)
        return 0
    budget = parse_duration(parameters["budget"])
    if not budget:
        raise ConfigError(f"--budget {parameters['budget']!r} is not a time such as 15m or 90s")
    folder = Path(parameters["output_dir"] or Path("runs") / f"reproduce-{study}")
    jobs = parameters["jobs"]
    display = Display(quiet=parameters["quiet"], bar=not parameters["no_progress"])
    launchers = [make_launcher(RunConfig(), several_cells=True) for _ in range(jobs)]
    gpu = any(claim.needs_gpu for claim in claims) and sees_gpu()
    with launchers[0] if jobs == 1 else Several(launchers) as launcher:
        done = reproduce(
            read, claims, folder, launcher, gpu=gpu, budget_seconds=budget, observer=display, jobs=jobs,
            command=shlex.join(["ampcompare", *sys.argv[1:]]), save=write_reports,
        )  # fmt: skip
    write_atomically(folder / "reproduce.md", render_markdown(done))
    write_atomically(folder / "reproduce.json", dump_json(findings_data(done)) + "\n")
    click.echo(dump_json(findings_data(done)) if parameters["as_json"] else render_text(done), nl=parameters["as_json"])
    if not parameters["quiet"]:
        click.echo(f"report: {folder / 'reproduce.md'}", err=True)
    return 0
