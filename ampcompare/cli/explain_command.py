"""`ampcompare explain`: what an arm does to numbers."""

from __future__ import annotations

import re
import shutil
from typing import Any

import click

from ampcompare.arm import Arm
from ampcompare.cli.options import recipe_options
from ampcompare.cli.settings import gather

__all__ = ["command"]

WIDEST = 120


@click.command("explain")
@click.argument("arm_text", metavar="ARM")
@recipe_options
@click.option("--all-modules", is_flag=True, help="a row for each module, however many there are")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout instead of the text")
def command(**parameters: Any) -> int:
    """Say what an arm does to numbers, and what its native twin is.

    ARM is an opt level such as O2, or any arm: native:fp16, half:bn_fp32, apex:O2,loss_scale=128. With --arch (or
    --config) the model is prepared, and one step shows the type of each module's weights, inputs and outputs.
    """
    from ampcompare.explain.explanation import explain_arm
    from ampcompare.explain.text import render_explanation
    from ampcompare.record import dump_json

    arm = _arm(parameters["arm_text"])
    explanation = explain_arm(arm)
    observation = None
    if any(parameters[name] is not None for name in ("recipe__model__arch", "config_file", "recipe_name")):
        from ampcompare.explain.observation import observe_in_child

        observation = observe_in_child(gather({**parameters, "arm_text": str(arm)}, one_run=True).config)
    if parameters["as_json"]:
        click.echo(dump_json({**explanation.data(), "observed": observation}))
        return 0
    width = min(shutil.get_terminal_size((100, 24)).columns, WIDEST)
    click.echo(render_explanation(explanation, width=width), nl=False)
    if observation is not None:
        from ampcompare.explain.observed_text import render_observation

        click.echo(
            "\n" + render_observation(observation, width=width, every_module=parameters["all_modules"]), nl=False
        )
    return 0


def _arm(text: str) -> Arm:
    """Read an arm, or an opt level with its options, mistyped ones too, whose error says so."""
    return Arm.parse(f"apex:{text}" if re.match(r"[Oo0]\d", text) else text)
