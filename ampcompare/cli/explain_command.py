"""`ampcompare explain`: what an arm does to numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import LaunchError
from ampcompare.cli.forms import CommandForm, default_form, form_asked_by_parameter
from ampcompare.cli.output import print_document, print_json, say_on_stdout, text_width
from ampcompare.cli.settings import WATCHED, ScriptCommand, add_watched_script_options, config_of_watched_arm
from ampcompare.cli.shared_options import SETTING_OPTIONS, json_option, recipe_options
from ampcompare.settings.reads import EXPLAIN

if TYPE_CHECKING:
    from ampcompare.results.records.ledger import Ledger
    from ampcompare.settings.config import RunConfig


def _is_model_named(values: Mapping[str, Any]) -> bool:
    """Return whether a call names the model that is prepared."""
    return any(values[name] is not None for name in ("recipe__model__arch", "config_file", "recipe_name"))


IN_EACH = ("arm_text", "as_json")
OF_SCRIPT = form_asked_by_parameter("a script", "script", (*IN_EACH, *WATCHED, *SETTING_OPTIONS))
OF_MODEL = CommandForm(
    "a model named with --arch", frozenset({*IN_EACH, "seed", *SETTING_OPTIONS}), _is_model_named
)
FORMS = (OF_SCRIPT, OF_MODEL, default_form(IN_EACH))


@click.command(
    "explain",
    cls=ScriptCommand,
    forms=FORMS,
    common=[
        "--arch",
        "--data",
        "--data-dir",
        "--batch-size",
        "--optimizer",
        "--recipe",
        "--device",
        "--json",
    ],
    examples=[
        ("What O2 does, and its torch.amp equivalent:", "ampcompare explain O2"),
        (
            "What it does to each module of ResNet-18:",
            "ampcompare explain O2 --arch resnet18 --data synthetic",
        ),
        (
            "In which types your script trains under it:",
            "ampcompare explain O2 --device cpu -- train.py --epochs 1",
        ),
    ],
)
@click.argument("arm_text", metavar="ARM")
@add_watched_script_options
@recipe_options(EXPLAIN)
@json_option()
def command(asked: CommandForm, **parameters: Any) -> int:
    """Explain a precision setting: dtypes, casts, torch.amp equivalent.

    ARM is an opt level such as O2, or any arm: bf16, half:bn_fp32, apex:O2,loss_scale=128. With --arch (or --config)
    the model is prepared, and one step shows the type of each module's weights, inputs and outputs. A script after --
    is trained for some steps under ARM; what ran is shown next to what ARM declares.
    """
    from ampcompare.diagnosis.explain import (
        casts_text,
        explain_arm,
        explanation_document,
        observation_text,
        observe_small_step_in_child,
        read_autocast_lists_in_child,
    )
    from ampcompare.experiment.option_checks import check_cells
    from ampcompare.results.report.documents.ledger import ledger_document
    from ampcompare.results.report.terminal import Terminal
    from ampcompare.settings.config import AUTOCAST_LISTS

    arm = Arm.parse(parameters["arm_text"])
    width = text_width()
    below = ""
    explanation = explain_arm(arm)
    document = explanation.data()
    if asked is OF_SCRIPT:
        ran = _train_script_for_ledger(config_of_watched_arm(parameters, str(arm), EXPLAIN))
        document["ledger"] = ran.model_dump()
        below = Terminal(width, details=True).document_text(ledger_document(ran, arm))
    elif asked is OF_MODEL:
        config = config_of_watched_arm(parameters, str(arm), EXPLAIN)
        check_cells([config])
        document["observed"] = observation = observe_small_step_in_child(config)
        below = observation_text(observation, width=width)
    else:
        document["observed"] = None
        if arm.roles is not None and arm.roles.lists == AUTOCAST_LISTS:
            document["casts"] = casts = read_autocast_lists_in_child()
            below = "" if casts is None else casts_text(casts, arm.roles.half, width=width)
    if parameters["as_json"]:
        print_json(document)
    else:
        print_document(explanation_document(explanation), width=width)
        if below:
            say_on_stdout(f"\n{below}", nl=False)
    return 0


def _train_script_for_ledger(config: RunConfig) -> Ledger:
    """Train a script for some steps, and return in which types."""
    from ampcompare.experiment.launch.script.listing import run_script_briefly_and_make_record
    from ampcompare.experiment.option_checks import check_cells

    check_cells([config])
    with tempfile.TemporaryDirectory() as folder:
        record = run_script_briefly_and_make_record(config, Path(folder))
    if record.ledger is None:
        raise LaunchError(f"{config.arm}: {record.error or 'the script has made no step'}")
    return record.ledger
