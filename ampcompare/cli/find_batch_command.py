"""`ampcompare find-batch`: the largest batch that each arm fits."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ampcompare.api.diagnosis import find_batch as api_find_batch
from ampcompare.backends.arm import parse_arms
from ampcompare.base.option_rules import OptionRule
from ampcompare.cli.help import ARMS, MACHINE, Command, option, option_factory
from ampcompare.cli.launching import leave_block_at_signals
from ampcompare.cli.output import note_on_stderr
from ampcompare.cli.settings import request_from
from ampcompare.cli.shared_options import json_option, recipe_options
from ampcompare.experiment.sources import collect_settings
from ampcompare.settings.reads import FIND_BATCH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ampcompare.experiment.find_batch import BatchLimit

NO_STACK = OptionRule(
    "find-batch",
    "is not for a stack, which trains a script, whose batches are its own",
    "leave out --stack and @; where the stack has ampcompare, call find-batch there",
    lambda values: bool(values["stacks"]) or any("@" in arm for arm in values["arms"]),
)

batch_option = option_factory(api_find_batch)


@click.command(
    "find-batch",
    cls=Command,
    rules=(NO_STACK,),
    common=[
        "--arm",
        "--memory-limit",
        "--margin",
        "--arch",
        "--data",
        "--batch-size",
        "--optimizer",
        "--device",
    ],
    examples=[
        ("On the GPU:", "ampcompare find-batch --arm fp32,O2,bf16 --arch resnet50 --data synthetic"),
        ("In 2 GiB of a CPU's memory:", "ampcompare find-batch --arm fp32,bf16 --memory-limit 2"),
    ],
)
@batch_option(
    "--arm",
    "arms",
    multiple=True,
    metavar="ARM[,ARM...]",
    group=ARMS,
    help="arms to try; repeatable, or comma-separated  [default: fp32]",
)
@batch_option("--memory-limit", metavar="GIB", group=MACHINE)
@batch_option("--margin", metavar="PERCENT", group=MACHINE)
@batch_option("--gpus", metavar="LIST", group=MACHINE)
@batch_option("--preflight/--no-preflight", group=MACHINE)
@option(
    "--stack",
    "stacks",
    multiple=True,
    metavar="NAME=COMMAND",
    group=ARMS,
    help="refused: a stack trains a script, whose batches are its own; where it has ampcompare, call find-batch there",
)
@recipe_options(FIND_BATCH)
@json_option()
def command(**parameters: Any) -> int:
    """Find the largest batch that each arm fits.

    Tries the batch size, doubles it while a few updates and an evaluation fit, then bisects; the result is within 1/16
    of the largest. Each try runs in a separate process. On a GPU, a batch is too large if memory runs out or --margin
    does not stay free; on a CPU, if the process grows by more than --memory-limit, which is required there.
    """
    from ampcompare.experiment.find_batch import (
        BatchSearchTerms,
        configs_of_arms,
        find_largest_batches_on_free_gpu,
    )
    from ampcompare.results.records.run import dump_json
    from ampcompare.results.report.tables import listing_table, terminal_width

    config = collect_settings(request_from({**parameters, "arm_text": None}), FIND_BATCH, one_run=True).config
    arms = [str(arm) for arm in parse_arms(parameters["arms"] or ("fp32",))]
    search = BatchSearchTerms(
        configs_of_arms(config, list(dict.fromkeys(arms))),
        memory_gib=parameters["memory_limit"],
        margin=parameters["margin"] / 100,
        note=note_on_stderr,
        preflight=parameters["preflight"],
    )
    with leave_block_at_signals():
        limits = find_largest_batches_on_free_gpu(search, parameters["gpus"])
    if parameters["as_json"]:
        click.echo(dump_json([asdict(limit) for limit in limits]))
    else:
        click.echo(
            listing_table(
                _rows_of_limits(limits),
                ["arm", "largest batch", "peak MiB", "next tried", "does not fit"],
                terminal_width(),
            )
        )
    return 0


def _rows_of_limits(limits: Sequence[BatchLimit]) -> list[list[str]]:
    from ampcompare.base.formatting import format_mebibytes, printable_line

    rows = []
    for limit in limits:
        largest, peak = "none", None
        if limit.fits is not None:
            largest, peak = str(limit.fits.batch), limit.fits.peak_bytes
        next_tried, reason = "-", "-"
        if limit.fails is not None:
            next_tried, reason = str(limit.fails.batch), printable_line(limit.fails.reason)
        rows.append([limit.arm, largest, format_mebibytes(peak), next_tried, reason])
    return rows
