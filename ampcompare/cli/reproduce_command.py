"""`ampcompare reproduce`: small versions of published claims."""

from __future__ import annotations

from typing import Any

import click

from ampcompare.cli.help import OUTPUT, Command, option, options_of
from ampcompare.cli.launching import options_by_name, pool_options, save_at_signals
from ampcompare.cli.options import printing_options, wait_option
from ampcompare.cli.values import CLAIM, FOLDER, Choice
from ampcompare.experiment.claims.definition import OLD_STUDIES, STUDIES
from ampcompare.experiment.options import StudyOptions, to_seconds

__all__ = ["command"]


@click.command(
    "reproduce",
    cls=Command,
    examples=[
        ("Which claims there are:", "ampcompare reproduce articles --list"),
        ("Two of them, in at most five minutes:", "ampcompare reproduce articles o3-diverges o2-trains --budget 5m"),
    ],
)
@click.argument("study", metavar="articles", type=Choice(STUDIES, OLD_STUDIES))
@click.argument("names", metavar="[CLAIM]...", nargs=-1, type=CLAIM)
@option("--list", "only_list", is_flag=True, help="list the claims, and run nothing")
@options_of(StudyOptions)("--budget", metavar="TIME", help="wall time limit: no seed begins after it")
@pool_options(
    "cells to run in parallel, each on its own GPUs or cores; times are judged on equal GPUs only  [default: one per "
    "free GPU, or 1]"
)
@option(
    "--output-dir",
    "-o",
    type=FOLDER,
    group=OUTPUT,
    help="folder for records and reports  [default: runs/reproduce-STUDY]",
)
@wait_option()
@printing_options
def command(study: str, names: tuple[str, ...], **parameters: Any) -> int:
    """Run small versions of published claims, each with a verdict.

    Each claim is tested by a small experiment with five seeds or more, on the bundled data. A claim that needs a GPU
    says so if there is none. Running the same command again resumes where it stopped. CLAIM is a name that --list
    prints; all by default.
    """
    from ampcompare.cli.progress_display import Display
    from ampcompare.experiment.claims.definition import load_study, study_name
    from ampcompare.experiment.claims.reproduce import claim_table, claims_document, run_study, select_claims
    from ampcompare.runs.report.base import FORMATS

    claims = select_claims(load_study(study), names)
    if parameters["only_list"]:
        click.echo(claim_table(claims), nl=False)
        return 0
    budget = to_seconds("--budget", parameters["budget"])
    options = options_by_name(StudyOptions, parameters, study=study_name(study), claims=names, budget=budget)
    with Display(quiet=parameters["quiet"], bar=not parameters["no_progress"]) as display:
        result = run_study(options, observer=display, while_running=save_at_signals)
    form = FORMATS["json" if parameters["as_json"] else "table"]
    click.echo(form.reporter().write(claims_document(result)), nl=False)
    if not parameters["quiet"]:
        click.echo(f"report: {options.folder / 'reproduce.md'}", err=True)
    return 0
