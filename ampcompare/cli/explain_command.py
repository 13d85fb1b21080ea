"""`ampcompare explain`: what an arm does to numbers."""

from __future__ import annotations

import shutil
from typing import Any

import click

from ampcompare.cli.options import recipe_options
from ampcompare.cli.settings import request_from
from ampcompare.experiment.sources import collect_settings

__all__ = ["command"]

MAX_WIDTH = 120


@click.command("explain")
@click.argument("arm_text", metavar="ARM")
@recipe_options
@click.option("--all-modules", is_flag=True, help="a row for each module, however many there are")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout instead of the text")
def command(**parameters: Any) -> int:
    """Explain a precision setting: dtypes, casts, torch.amp equivalent.

    ARM is an opt level such as O2, or any arm: native:fp16, half:bn_fp32, apex:O2,loss_scale=128. With --arch (or
    --config) the model is prepared, and one step shows the type of each module's weights, inputs and outputs.
    """
    from ampcompare.explain.explain import explain_arm, parse_arm_or_level
    from ampcompare.explain.render import render_explanation
    from ampcompare.records.run import dump_json

    arm = parse_arm_or_level(parameters["arm_text"])
    explanation = explain_arm(arm)
    observation = None
    if any(parameters[name] is not None for name in ("recipe__model__arch", "config_file", "recipe_name")):
        from ampcompare.experiment.preflight import check_cells
        from ampcompare.explain.observation import observe_in_child

        config = collect_settings(request_from({**parameters, "arm_text": str(arm)}), one_run=True).config
        check_cells([config])
        observation = observe_in_child(config)
    if parameters["as_json"]:
        click.echo(dump_json({**explanation.data(), "observed": observation}))
        return 0
    width = min(shutil.get_terminal_size((100, 24)).columns, MAX_WIDTH)
    click.echo(render_explanation(explanation, width=width), nl=False)
    if observation is not None:
        from ampcompare.explain.render_observation import render_observation

        click.echo(
            "\n" + render_observation(observation, width=width, every_module=parameters["all_modules"]), nl=False
        )
    return 0
