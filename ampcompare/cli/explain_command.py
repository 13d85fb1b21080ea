"""`ampcompare explain`: what an arm does to numbers."""

from __future__ import annotations

from typing import Any

import click

from ampcompare.backends.arm import Arm
from ampcompare.cli.help import OUTPUT, Command, option
from ampcompare.cli.options import json_option, recipe_options
from ampcompare.cli.output import text_width
from ampcompare.cli.settings import request_from
from ampcompare.cli.values import ARM
from ampcompare.experiment.sources import collect_settings

__all__ = ["command"]


@click.command(
    "explain",
    cls=Command,
    common=["--arch", "--data", "--data-dir", "--batch-size", "--optimizer", "--recipe", "--all-modules", "--json"],
    examples=[
        ("What O2 does, and its torch.amp equivalent:", "ampcompare explain O2"),
        ("What it does to each module of ResNet-18:", "ampcompare explain O2 --arch resnet18 --data synthetic"),
    ],
)
@click.argument("arm_text", metavar="ARM", type=ARM)
@recipe_options
@option("--all-modules", is_flag=True, group=OUTPUT, help="a row for each module, however many there are")
@json_option()
def command(**parameters: Any) -> int:
    """Explain a precision setting: dtypes, casts, torch.amp equivalent.

    ARM is an opt level such as O2, or any arm: bf16, half:bn_fp32, apex:O2,loss_scale=128. With --arch (or --config)
    the model is prepared, and one step shows the type of each module's weights, inputs and outputs.
    """
    from ampcompare.diagnosis.explain import explain_arm
    from ampcompare.runs.records.run import dump_json
    from ampcompare.runs.report.terminal import Terminal

    arm = Arm.parse(parameters["arm_text"])
    explanation = explain_arm(arm)
    observation = None
    if any(parameters[name] is not None for name in ("recipe__model__arch", "config_file", "recipe_name")):
        from ampcompare.diagnosis.explain import observe_in_child
        from ampcompare.experiment.option_checks import check_cells

        config = collect_settings(request_from({**parameters, "arm_text": str(arm)}), one_run=True).config
        check_cells([config])
        observation = observe_in_child(config)
    if parameters["as_json"]:
        click.echo(dump_json({**explanation.data(), "observed": observation}))
        return 0
    width = text_width()
    click.echo(Terminal(width).render(explanation), nl=False)
    if observation is not None:
        from ampcompare.diagnosis.explain import render_observation

        click.echo(
            "\n" + render_observation(observation, width=width, every_module=parameters["all_modules"]), nl=False
        )
    return 0
