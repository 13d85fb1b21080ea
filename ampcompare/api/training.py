"""Train one arm: the command `run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ampcompare.api.arguments import (
    launch_options,
    loaded_callbacks,
    optional_path,
    settings_request,
    wait_seconds,
    with_script,
)
from ampcompare.base.errors import ConfigError
from ampcompare.experiment.notebook_progress import default_observer
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.options import LaunchOptions, RunOptions
from ampcompare.experiment.single_run import run_single
from ampcompare.experiment.sources import SettingsRequest, collect_settings
from ampcompare.records.callback import Callback
from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import Recipe

__all__ = ["run"]


def run(
    config: RunConfig | None = None,
    *,
    recipe: Recipe | str | None = None,
    size: str | None = None,
    config_file: str | Path | None = None,
    output_dir: str | Path | None = None,
    force: bool = False,
    wait: float | str = 0,
    script: Sequence[str] | None = None,
    metrics: Sequence[str] | str = (),
    mask: Sequence[str] | str = (),
    slurm_options: Mapping[str, str] | None = None,
    launch: LaunchOptions | None = None,
    callbacks: Sequence[Callback | str] = (),
    observer: Observer | None = None,
    **settings: Any,
) -> RunRecord:
    """Train one arm in a separate process and return its record.

    Args:
        config: the complete configuration; or leave it out and describe it by the next arguments. The defaults train
        fp32
            on the bundled digits.
        recipe: a recipe, its name, or a YAML file with one; of several rows the first is trained.
        size: a smaller size of a named recipe, such as "small".
        config_file: YAML file of settings, which win over those of the recipe.
        output_dir: run directory, by default `runs/run-<digest of config>`.
        force: train again even if there is a usable record.
        wait: seconds, or a text such as "10m", to wait for another command that uses the run directory.
        script: a user's own script with its arguments, or "-m" and a module: it trains instead of the recipe.
        metrics: numbers that it prints or logs, as for `--metric`; verdicts use the first one.
        mask: names of further arguments of the script, and of variables of the environment, whose values are kept out
            of all files, such as "pin" or "my_*".
        slurm_options: sbatch options, for the launcher slurm: {"partition": "gpu", "exclusive": ""}.
        launch: how processes are started, over several nodes for example.
        callbacks: called for each step, epoch and end of a run; a text is a factory, `package.module:factory`.
        observer: receives progress and notes; in a notebook a display of the progress by default.
        settings: further fields of `RunConfig`, which win over the file: `arm="apex:O2"`, `device="cpu"`; or paths of
            settings, as in `**{"recipe.epochs": 3}`.

    Returns:
        The record, even if the run failed or diverged: see its `status` and `error`.

    Raises:
        ConfigError: settings that cannot be used, or another command uses the folder.
        EnvironmentUnfit: this machine lacks something that was requested.
        LaunchError: no process could be started.
    """
    request = settings_request(recipe, size, config_file, with_script(settings, script, metrics, mask))
    if config is not None and request != SettingsRequest():
        raise ConfigError(
            "run takes either a complete config, or a recipe, file and settings, but both were given; leave one out"
        )
    options = RunOptions(
        config=config or collect_settings(request, one_run=True).config,
        output_dir=optional_path(output_dir),
        force=force,
        wait_seconds=wait_seconds(wait),
        launch=launch_options(launch, slurm_options),
        callbacks=loaded_callbacks(callbacks),
    )
    return run_single(options, observer=default_observer(observer)).record
