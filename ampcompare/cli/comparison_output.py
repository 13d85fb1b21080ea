"""What `compare` prints: the plan of a dry run, the answer with its table, and the limits that were exceeded."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ampcompare.base.errors import RecordError
from ampcompare.base.files.run_files import RunFile
from ampcompare.base.formatting import format_count, format_duration, format_mebibytes, printable_line
from ampcompare.cli.help import OUTPUT, option
from ampcompare.cli.output import print_document, print_folded_on_stderr, print_json

if TYPE_CHECKING:
    from ampcompare.experiment.compare import ComparisonOutcome, PlannedComparison
    from ampcompare.results.records.comparison import Comparison
    from ampcompare.results.records.preflight import Preflight


details_option = option(
    "--details",
    is_flag=True,
    group=OUTPUT,
    help="also print all measurements, verdicts on time, conclusions and the environment",
)


def show_comparison(outcome: ComparisonOutcome, *, as_json: bool, quiet: bool, details: bool = False) -> None:
    """Print the table or the JSON document; if all cells failed with one error, that error instead of the table."""
    from ampcompare.results.report.base import FORMATS
    from ampcompare.results.report.documents.comparison import comparison_document

    failure = outcome.record_of_common_failure
    if as_json or failure is None:
        document = comparison_document(outcome.comparison)
        print_document(document, "json" if as_json else "table", details=details)
    if failure is not None:
        what = (
            "every cell"
            if len(outcome.comparison.records) == len(outcome.comparison.order)
            else "each cell that ran"
        )
        print_folded_on_stderr(
            f"ampcompare: {what} failed: {printable_line(failure.error or '', 2000, keep_end=600)}"
        )
    elif not quiet:
        if sys.stdout.isatty() and sys.stderr.isatty():
            click.echo(err=True)
        click.echo(f"report: {outcome.folder / 'report.md'}", err=True)
        page = FORMATS["html"]
        if page.missing_packages:
            click.echo('no HTML page: pip install "ampcompare[html]" adds it', err=True)
        elif page.file:
            click.echo(f"page: {outcome.folder / page.file}", err=True)


def say_unused_records(comparison: Comparison) -> int:
    """Print on stderr which records are left out, and return the exit code that says so; 0 if none is."""
    for line in comparison.excluded:
        click.echo(f"ampcompare: not used: {printable_line(line, 2000)}", err=True)
    return RecordError.exit_code if comparison.excluded else 0


def show_failed_gates(outcome: ComparisonOutcome, *, quiet: bool) -> None:
    """Print on stderr which limits were exceeded or not checked; nothing if the exit code is about failed arms."""
    if outcome.exit_code not in (0, 1):
        return
    for check in outcome.checks:
        if check.skipped and not quiet:
            print_folded_on_stderr(
                f"note: {printable_line(f'{check.arm}: {check.gate} is not checked: {check.skipped}', 500)}"
            )
    for check in outcome.checks:
        if check.failure:
            print_folded_on_stderr(f"failed: {printable_line(f'{check.arm}: {check.failure}', 500)}")


def show_plan(planned: PlannedComparison, found: Preflight | None, *, as_json: bool) -> None:
    """Print the cells of a plan, what a few steps of their arms have shown, and an estimate of time and memory."""
    from ampcompare.experiment.eta import estimate_remaining_cost

    plan, folder = planned.plan, planned.folder
    remaining = estimate_remaining_cost(plan, folder, found)
    labeled_cells = list(zip(plan.labels, plan.cells, strict=True))
    if as_json:
        cells = [
            {"cell": cell.digest(), "arm": label, "seed": cell.recipe.seed} for label, cell in labeled_cells
        ]
        seen = None if found is None else found.model_dump(mode="json")
        parts = {"output_dir": str(folder), "cells": cells, "estimate": asdict(remaining), "preflight": seen}
        print_json(parts)
        return
    is_recorded = (folder / RunFile.PLAN).exists()
    order = "in this order" if is_recorded else "in an order like this, which each new run directory draws"
    lines = [f"{format_count(len(plan.cells), 'cell')} into {folder}, {order}:"]
    lines += [f"  {cell.digest()}  {label}, seed {cell.recipe.seed}" for label, cell in labeled_cells]
    lines += [] if found is None or not found.arms else found.summary_lines(plan.labels)
    if not remaining.cells:
        refused = [label for label in plan.arms if found is not None and found.is_refused(label)]
        why = (
            f"the other cells, of {', '.join(refused)}, cannot train"
            if refused
            else "every cell has a record"
        )
        lines.append(f"time and memory: none, {why}")
    elif remaining.seconds is not None:
        memory = (
            ""
            if remaining.peak_bytes is None
            else f", at most {format_mebibytes(remaining.peak_bytes)} MiB for one"
        )
        source = "existing records" if not remaining.unknown else "a few steps of each arm"
        lines.append(
            f"time and memory: about {format_duration(remaining.seconds)} for "
            f"{format_count(remaining.cells, 'cell')} without a record{memory}, estimated from {source}"
        )
    elif found is None:
        lines.append(
            f"time and memory: unknown, because {folder} has no record of {', '.join(remaining.unknown)} with these "
            "settings; run one seed (--seeds 0) to have an estimate"
        )
    click.echo("\n".join(lines))
