"""`ampcompare find-batch`: the largest batch that each arm fits."""

from __future__ import annotations

from typing import Any

import click

from ampcompare.api.diagnosis import find_batch as api_find_batch
from ampcompare.base.errors import LaunchError
from ampcompare.cli.help import ARMS, MACHINE, Command, make_option_from_signature
from ampcompare.cli.launching import leave_block_at_signals
from ampcompare.cli.output import print_document, print_folded_on_stderr
from ampcompare.cli.settings import settings_request_from
from ampcompare.cli.shared_options import json_option, recipe_options, stack_option
from ampcompare.experiment.sources import collect_settings
from ampcompare.settings.reads import FIND_BATCH

batch_option = make_option_from_signature(api_find_batch)


@click.command(
    "find-batch",
    cls=Command,
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
        (
            "In another environment that has ampcompare, too:",
            "ampcompare find-batch --stack old=/envs/old/bin/python --arm O2@old,O2",
        ),
    ],
)
@batch_option(
    "--arm",
    "arms",
    multiple=True,
    metavar="ARM[,ARM...]",
    group=ARMS,
    help="arms to try, as in fp32 or O2@old; repeatable, or comma-separated  [default: fp32]",
)
@batch_option("--memory-limit", metavar="GIB", group=MACHINE)
@batch_option("--margin", metavar="PERCENT", group=MACHINE)
@batch_option("--gpus", metavar="LIST", group=MACHINE)
@batch_option("--preflight/--no-preflight", group=MACHINE)
@stack_option(batch_option, "O2")
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
    from ampcompare.results.report.documents.batch_limits import batch_limits_document
    from ampcompare.settings.stack import parse_stacks

    config = collect_settings(
        settings_request_from({**parameters, "arm_text": None}), FIND_BATCH, one_run=True
    ).config
    search = BatchSearchTerms(
        configs_of_arms(config, parameters["arms"] or ("fp32",), parse_stacks(parameters["stacks"])),
        memory_gib=parameters["memory_limit"],
        margin=parameters["margin"] / 100,
        note=print_folded_on_stderr,
        preflight=parameters["preflight"],
    )
    with leave_block_at_signals():
        limits = find_largest_batches_on_free_gpu(search, parameters["gpus"])
    print_document(batch_limits_document(limits), "json" if parameters["as_json"] else "table")
    return LaunchError.exit_code if all(limit.error is not None for limit in limits) else 0
