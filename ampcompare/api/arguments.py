"""Convert arguments of the Python functions into the options that the package uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ampcompare.base.errors import ConfigError
from ampcompare.experiment.follow import load_callback
from ampcompare.experiment.options import LaunchOptions, to_seconds
from ampcompare.experiment.sources import SettingsRequest
from ampcompare.records.callback import Callback
from ampcompare.settings.layers import Layer
from ampcompare.settings.recipe import Recipe
from ampcompare.settings.script import script_config

__all__ = ["launch_options", "loaded_callbacks", "optional_path", "settings_request", "wait_seconds", "with_script"]


def settings_request(
    recipe: Recipe | str | None, size: str | None, config_file: str | Path | None, settings: Mapping[str, Any]
) -> SettingsRequest:
    """Return where settings come from; of pydantic models only the fields that were set count as given.

    Raises:
        ConfigError: a size together with a `Recipe` object.
    """
    values = {
        name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in settings.items()
    }
    if isinstance(recipe, Recipe):
        if size is not None:
            raise ConfigError(f"size {size!r} is for a named recipe, and a Recipe object was given")
        values["recipe"] = recipe.model_dump(exclude_unset=True)
    return SettingsRequest(
        recipe=recipe if isinstance(recipe, str) else None,
        size=size,
        file=None if config_file is None else str(config_file),
        layers=(Layer("argument", values),) if values else (),
    )


def with_script(
    settings: Mapping[str, Any],
    script: Sequence[str] | None,
    metrics: Sequence[str] | str,
    mask: Sequence[str] | str = (),
) -> dict[str, Any]:
    """Return the settings, including those of the script if there is one.

    Raises:
        ConfigError: metrics without a script, or a script or metric that cannot be used.
    """
    if script is None:
        if mask:
            raise ConfigError("mask needs a script; pass one, as in script=['train.py']")
        if metrics:
            raise ConfigError("metrics needs a script; pass one, as in script=['train.py']")
        return dict(settings)
    values = dict(settings)
    max_steps = values.pop("recipe.max_steps", None)
    named = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    names = (mask,) if isinstance(mask, str) else tuple(mask)
    return {**values, "script": script_config(script, metrics=named, max_steps=max_steps, mask=names)}


def launch_options(launch: LaunchOptions | None, slurm_options: Mapping[str, str] | None) -> LaunchOptions:
    """Return how processes are started.

    Raises:
        ConfigError: Slurm's options are given twice.
    """
    if launch is not None and slurm_options is not None:
        raise ConfigError("launch has slurm_options of its own; give only one of them")
    return launch or LaunchOptions(slurm_options=slurm_options or {})


def loaded_callbacks(callbacks: Sequence[Callback | str]) -> tuple[Callback, ...]:
    """Return the callbacks, with each text that names a factory replaced by what the factory returns.

    Raises:
        ConfigError: a factory cannot be imported or called.
    """
    return tuple(load_callback(each) if isinstance(each, str) else each for each in callbacks)


def wait_seconds(wait: float | str) -> float:
    """Return the seconds of a number or a text such as "10m".

    Raises:
        ConfigError: no duration.
    """
    return to_seconds("wait", wait) if wait else 0.0


def optional_path(path: str | Path | None) -> Path | None:
    """Return a path for a text; None stays None."""
    return None if path is None else Path(path)
