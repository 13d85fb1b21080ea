"""`ampcompare diagnose`: where numbers overflow, what is lost, and what to keep in fp32."""

from functools import cache
from pathlib import Path
from typing import Any

import click

from ampcompare.api.diagnosis import diagnose as api_diagnose
from ampcompare.api.diagnosis import look_ahead as api_look_ahead
from ampcompare.backends.arm import parse_arms
from ampcompare.base.option_rules import OptionRule
from ampcompare.cli.forms import CommandForm, default_form, form_asked_by_parameter
from ampcompare.cli.help import ARMS, OUTPUT, SCRIPT, default_of_parameter, make_option_from_signature, option
from ampcompare.cli.launching import leave_block_at_signals
from ampcompare.cli.output import print_document, print_folded_on_stderr, text_width
from ampcompare.cli.settings import WATCHED, ScriptCommand, add_watched_script_options, config_of_watched_arm
from ampcompare.cli.shared_options import SETTING_OPTIONS, json_option, recipe_options
from ampcompare.cli.values import FOLDER
from ampcompare.settings.reads import AHEAD, DIAGNOSE

DEFAULT_ARM = default_of_parameter(api_diagnose, "arm")

# What both forms read, next to the settings in `settings/reads.py`.
IN_BOTH = ("arms", "steps", "output_dir", "as_json", *WATCHED, *SETTING_OPTIONS)
LOOK_AHEAD = form_asked_by_parameter(
    "--ahead", "ahead", (*IN_BOTH, "prefix", "twin"), ", which repeats no operation"
)
FORMS = (LOOK_AHEAD, default_form((*IN_BOTH, "reference", "cures", "preflight")))
ONE_ARM = OptionRule(
    "--arm",
    "with several arms needs --ahead",
    "give one arm, or both",
    lambda values: not values["ahead"] and len(parse_arms(values["arms"] or (DEFAULT_ARM,))) > 1,
)

diagnose_option = make_option_from_signature(api_diagnose)
ahead_option = make_option_from_signature(api_look_ahead)


@click.command(
    "diagnose",
    cls=ScriptCommand,
    forms=FORMS,
    rules=(ONE_ARM,),
    common=[
        *("--arm", "--ahead", "--steps", "--reference", "--cures", "--arch", "--data", "--batch-size"),
        *("--lr", "--optimizer", "--recipe", "--device", "--output-dir", "--json"),
    ],
    examples=[
        ("What O2 does to the numbers of a small network:", "ampcompare diagnose --arm O2 --arch convnet"),
        ("Your own training script:", "ampcompare diagnose --arm O2 --device cpu -- train.py --epochs 1"),
        (
            "What its first steps tell of the rest:",
            "ampcompare diagnose --ahead --arm half:bf16,O2 -- train.py",
        ),
    ],
)
@option(
    "--arm",
    "arms",
    multiple=True,
    metavar="ARM[,ARM...]",
    group=ARMS,
    help="what to diagnose; several with --ahead  [default: apex:O2]",
)
@option(
    "--ahead", is_flag=True, group=OUTPUT, help="say from the first steps which arms will hold to the end"
)
@ahead_option("--prefix", metavar="N", group=OUTPUT, help="with --ahead: steps to run")
@ahead_option(
    "--twin/--no-twin", group=OUTPUT, help="with --ahead: run them again from weights changed by 1/512"
)
@option(
    "--steps",
    type=click.IntRange(1),
    metavar="N",
    group=OUTPUT,
    help="updates of each run, 8 by default; with --ahead: of the whole training, where its scheduler does not say",
)
@diagnose_option("--reference", group=OUTPUT)
@diagnose_option("--cures/--no-cures", group=OUTPUT)
@add_watched_script_options
@diagnose_option("--preflight/--no-preflight", group=SCRIPT)
@recipe_options(DIAGNOSE, AHEAD)
@option(
    "--output-dir",
    "-o",
    type=FOLDER,
    group=OUTPUT,
    help="write diagnosis.json and .html into this folder, or outlook.*",
)
@json_option()
def command(asked: CommandForm, **parameters: Any) -> int:
    """Find where numbers overflow or are lost, and what to keep in fp32.

    Trains for some steps, repeats every operation in fp32, and tests which modules or functions must stay in fp32 to
    remove a fault. A script after -- is started again for each test. Exits with 0 whether or not there is a fault.

    With --ahead only the first steps are run, in fp32, and each arm gets one of three words: "will not hold",
    "no fault in sight", "cannot know".
    """
    if asked is LOOK_AHEAD:
        return _print_outlook(parameters)
    from ampcompare.diagnosis.options import DiagnoseOptions
    from ampcompare.experiment.diagnose import diagnose
    from ampcompare.experiment.option_checks import check_cells
    from ampcompare.experiment.preflight import run_trials_of_configs
    from ampcompare.results.report.documents.diagnosis import diagnosis_document

    (arm,) = parse_arms(parameters["arms"] or (DEFAULT_ARM,))
    config = config_of_watched_arm(parameters, str(arm), DIAGNOSE)
    options = DiagnoseOptions(
        config,
        steps=parameters["steps"] or DiagnoseOptions.steps,
        reference=parameters["reference"],
        cures=parameters["cures"],
    )
    options.check()
    check_cells([config])

    @cache  # the preflight and what follows may say the same
    def say(line: str) -> None:
        print_folded_on_stderr(f"ampcompare: {line}")

    with leave_block_at_signals():
        if config.script is not None and parameters["preflight"]:
            run_trials_of_configs([config], say, watches_failures=True)
        folder = parameters["output_dir"]
        diagnosis = diagnose(options, output_dir=Path(folder) if folder else None, say=say)
    form = "json" if parameters["as_json"] else "table"
    print_document(diagnosis_document(diagnosis), form, width=text_width())
    return 0


def _print_outlook(parameters: dict[str, Any]) -> int:
    """Print what the first steps tell of the rest."""
    from ampcompare.diagnosis.options import AheadOptions
    from ampcompare.experiment.look_ahead import look_ahead
    from ampcompare.results.report.base import write_result_in_formats
    from ampcompare.results.report.documents.outlook import outlook_document

    config = config_of_watched_arm(parameters, "fp32", AHEAD)
    arms = parse_arms(parameters["arms"] or (DEFAULT_ARM,))
    options = AheadOptions(config, arms, parameters["prefix"], parameters["steps"], parameters["twin"])

    def say(line: str) -> None:
        print_folded_on_stderr(f"ampcompare: {line}")

    with leave_block_at_signals():
        found = look_ahead(options, say)
        folder = parameters["output_dir"]
        for path in write_result_in_formats(found, Path(folder), ("json", "html")) if folder else ():
            say(f"wrote {path}")
    form = "json" if parameters["as_json"] else "table"
    print_document(outlook_document(found), form, width=text_width())
    return 0
