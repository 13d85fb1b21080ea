"""The settings that the flags, variables and arguments of a command ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ampcompare.cli.options import RECIPE_OPTIONS, parameter_of
from ampcompare.cli.script_options import script_layer
from ampcompare.experiment.sources import SettingsRequest
from ampcompare.runs.settings.layers import Layer, parse_assignment, set_path

__all__ = ["request_from"]

OTHER_PARAMETERS = {"guards": "guards", "processes": "processes", "seed": "recipe.seed", "arm_text": "arm"}
DERIVED = {"processes": "number of requested processes", "arm_text": "flags of the arm"}


def request_from(parameters: Mapping[str, Any]) -> SettingsRequest:
    """Return the settings that the present command asks for: `--set` below variables, and these below flags.

    Raises:
        ConfigError: a `--set` or `--model-arg` that cannot be read.
    """
    layers = []
    for text in parameters["overrides"]:
        values: dict[str, Any] = {}
        set_path(values, *parse_assignment(text, "--set"))
        layers.append(Layer(f"--set {text}", values))
    paths = {parameter_of(path): path for _, path, _ in RECIPE_OPTIONS} | OTHER_PARAMETERS
    from_environment: dict[str, Any] = {}
    from_flags: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, path in paths.items():
        if parameters.get(name) is None:
            continue
        is_variable, origins[path] = _source(name)
        set_path(from_environment if is_variable else from_flags, path, parameters[name])
    for text in parameters["model_args"]:
        name, value = parse_assignment(text, "--model-arg")
        set_path(from_flags, f"recipe.model.args.{name}", value)
        origins[f"recipe.model.args.{name}"] = "flag --model-arg"
    layers += [Layer("environment", from_environment, origins), Layer("flag", from_flags, origins)]
    if (script := script_layer(parameters)) is not None:
        layers.append(script)
    return SettingsRequest(
        parameters.get("recipe_name"), parameters.get("size"), parameters.get("config_file"), tuple(layers)
    )


def _source(name: str) -> tuple[bool, str]:
    """Return whether a parameter of the present command came from the environment, and what to call its source."""
    context = click.get_current_context()
    option = next((param for param in context.command.params if param.name == name), None)
    source = context.get_parameter_source(name)
    if option is None or source == click.core.ParameterSource.DEFAULT:  # derived from flags of other names
        return False, DERIVED.get(name, "flag")
    if source == click.core.ParameterSource.ENVIRONMENT:
        return True, f"environment {option.envvar}"
    return False, f"flag {max(option.opts, key=len)}" if isinstance(option, click.Option) else "argument"
