"""`ampcompare profile`: why an arm is faster or not, smaller or not."""

from functools import cache
from pathlib import Path
from typing import Any

import click

from ampcompare.api.diagnosis import profile as api_profile
from ampcompare.backends.arm import parse_arms
from ampcompare.cli.help import ARMS, OUTPUT, SCRIPT, default_of_parameter, make_option_from_signature, option
from ampcompare.cli.launching import leave_block_at_signals
from ampcompare.cli.output import print_document, print_folded_on_stderr, text_width
from ampcompare.cli.settings import ScriptCommand, add_watched_script_options, config_of_watched_arm
from ampcompare.cli.shared_options import json_option, recipe_options
from ampcompare.cli.values import FOLDER
from ampcompare.settings.reads import PROFILE

profile_option = make_option_from_signature(api_profile)


@click.command(
    "profile",
    cls=ScriptCommand,
    common=[
        *("--arm", "--steps", "--trials", "--arch", "--data", "--data-dir", "--batch-size"),
        *("--lr", "--optimizer", "--recipe", "--device", "--output-dir", "--json"),
    ],
    examples=[
        ("Why is bf16 not faster?", "ampcompare profile --arm fp32,bf16 --arch convnet"),
        (
            "What holds memory under O2, with a page and a trace:",
            "ampcompare profile --arm fp32,O2 -o profile",
        ),
        (
            "Your own training script:",
            "ampcompare profile --arm fp32,bf16 --device cpu -- train.py --epochs 1",
        ),
    ],
)
@profile_option(
    "--arm",
    "arms",
    multiple=True,
    metavar="ARM[,ARM...]",
    group=ARMS,
    help="what to profile, next to the first; repeatable, or comma-separated  [default: fp32,bf16]",
)
@profile_option("--steps", metavar="N", group=OUTPUT)
@profile_option("--profiled-steps", metavar="N", group=OUTPUT)
@profile_option("--trials/--no-trials", group=OUTPUT)
@add_watched_script_options
@profile_option("--preflight/--no-preflight", group=SCRIPT)
@recipe_options(PROFILE)
@option(
    "--output-dir", "-o", type=FOLDER, group=OUTPUT, help="write profile.json, .md, .html and trace.json here"
)
@json_option()
def command(**parameters: Any) -> int:
    """Find why an arm is faster or not, smaller or not.

    Trains each arm for some steps: timed, then under torch.profiler, then one step that counts memory and FLOPs. Shows
    one step and its peak of memory side by side, and the reasons that were measured. Exits with 0 whatever it finds.
    """
    from ampcompare.diagnosis.profiling.options import ProfileOptions
    from ampcompare.experiment.option_checks import check_cells
    from ampcompare.experiment.preflight import run_trials_of_configs
    from ampcompare.experiment.profile import profile, steps_needed_for_profile
    from ampcompare.results.report.documents.profile import profile_document

    arms = dict.fromkeys(
        map(str, parse_arms(parameters["arms"] or default_of_parameter(api_profile, "arms")))
    )
    configs = [config_of_watched_arm(parameters, arm, PROFILE) for arm in arms]
    options = ProfileOptions(
        tuple(configs),
        steps=parameters["steps"],
        profiled=parameters["profiled_steps"],
        trials=parameters["trials"],
    )
    options.check()
    check_cells(configs)

    @cache  # the preflight and what follows may say the same
    def say(line: str) -> None:
        print_folded_on_stderr(f"ampcompare: {line}")

    with leave_block_at_signals():
        if options.reference.script is not None and parameters["preflight"]:
            run_trials_of_configs(
                configs, say, min_steps=steps_needed_for_profile(options.steps, options.profiled)
            )
        folder = parameters["output_dir"]
        found = profile(options, output_dir=Path(folder) if folder else None, say=say)
    form = "json" if parameters["as_json"] else "table"
    print_document(profile_document(found), form, width=text_width())
    return 0
