"""Train arms on the same weights and batches, and compare them: the command `compare`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ampcompare.analysis.inference.criteria import Preference
from ampcompare.api.arguments import (
    launch_options,
    loaded_callbacks,
    optional_path,
    settings_request,
    wait_seconds,
    with_script,
)
from ampcompare.base.errors import GateFailed
from ampcompare.experiment.compare import run_comparison
from ampcompare.experiment.matrix import find_setting
from ampcompare.experiment.notebook_progress import default_observer
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.options import CompareOptions, LaunchOptions, to_seconds
from ampcompare.records.callback import Callback
from ampcompare.records.comparison import Comparison
from ampcompare.settings.recipe import Recipe
from ampcompare.settings.script import SCRIPT_ARMS

__all__ = ["compare"]


def compare(
    arms: Sequence[str] | str = (),
    *,
    reference: str | None = None,
    seeds: Iterable[int] | str | None = None,
    recipe: Recipe | str | None = None,
    size: str | None = None,
    config_file: str | Path | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    output_dir: str | Path | None = None,
    force: bool = False,
    margin: float | str | None = None,
    time_margin: float = 2.0,
    loss_margin: float = 1.0,
    looks: int | None = None,
    objective: Preference = "time",
    prefer: Preference | None = None,
    tag: str = "",
    budget: float | str = "30m",
    jobs: int | Literal["auto"] | None = None,
    gpus: str | None = None,
    timing_rounds: int = 0,
    profile: bool = False,
    fail_on: Sequence[str] | str = (),
    baseline: str | Path | None = None,
    wait: float | str = 0,
    tensorboard: str | Path | None = None,
    junit: str | Path | None = None,
    script: Sequence[str] | None = None,
    metrics: Sequence[str] | str = (),
    mask: Sequence[str] | str = (),
    slurm_options: Mapping[str, str] | None = None,
    launch: LaunchOptions | None = None,
    callbacks: Sequence[Callback | str] = (),
    observer: Observer | None = None,
    **settings: Any,
) -> Comparison:
    """Train every arm with every seed on the same weights and batches, compare them, and write the reports.

    Args:
        arms: texts such as "fp32", "bf16" or "apex:O2", or one text with several, as in "fp32,bf16". By default the
            arms of the recipe or file, or else nine.
        reference: the arm that the others are compared with; added if it is not listed. By default fp32, or else the
            first.
        seeds: each is one pair of runs between any two arms: integers, a text such as "0-4", or "auto" for as many as
            the margin needs. By default those of the recipe or file, or else 0, 1 and 2.
        recipe: what all arms train: a recipe, its name, or a YAML file with one.
        size: a smaller size of a named recipe, such as "small".
        config_file: YAML file of settings, which win over those of the recipe.
        sweep: settings with values to cross with the arms: {"workers": [0, 2]}.
        output_dir: run directory, by default `runs/compare-<digest of the plan>`.
        force: run every cell again.
        margin: equivalence margin of top-1, chosen before the runs: percentage points, or "10%" of the reference's
            errors, "2sd" (standard deviations over seeds) or "auto", the smaller of 0.5 points and 10 % of the errors.
            By default that of the recipe or file, or else "auto".
        time_margin: equivalence margin in percent of the step time.
        loss_margin: equivalence margin in percent of the training loss over the last fifth of the steps.
        looks: number of tests planned as seeds are added; 1 tests once, None leaves it open.
        objective: what the recommended arm should improve while keeping the accuracy.
        prefer: the former name of `objective`.
        tag: label of the report and its folder.
        budget: wall time limit of seeds "auto": seconds, or a text such as "30m".
        jobs: cells that run in parallel; "auto": as many as there are GPUs, or cores for the threads of a cell;
            by default "auto" where several GPUs are visible, else one. Step times of cells that run in parallel are
            compared on equal GPUs only.
        gpus: numbers of the GPUs to use, such as "0,2-3"; all that nobody uses by default.
        timing_rounds: how often the arms of a seed are timed again after their runs, in turns of a few steps.
        profile: after all runs, profile each arm with the first seed into the run directory, as `profile` does; where
            an arm is not faster, the headline says why.
        fail_on: limits such as "accuracy<-0.5" or "time>1.10x", checked for every arm.
        baseline: report.json or run directory that the limits compare with; by default the reference arm.
        wait: seconds, or a text such as "10m", to wait for another command that uses the run directory.
        tensorboard: folder for an event file per arm and seed.
        junit: file for the results of arms and limits as JUnit XML.
        script: a user's own script, as for `run`; by default its arms are script, fp32, O1, fp16 and bf16.
        metrics: as for `run`.
        mask: as for `run`.
        slurm_options: as for `run`.
        launch: how processes are started, over several nodes for example.
        callbacks: as for `run`.
        observer: receives progress and notes; in a notebook a display of the progress by default.
        settings: further fields of `RunConfig`, or paths of settings, as for `run`.

    Returns:
        The comparison that the reports show; failed cells are among its records.

    Raises:
        ConfigError: an arm or option that cannot be used, or another command uses the folder.
        EnvironmentUnfit: this machine lacks something that was requested.
        RecordError: the baseline cannot be read.
        LaunchError: no process could be started.
        GateFailed: an arm exceeds a limit of `fail_on`; its `comparison` has the results.
    """
    if prefer is not None:
        warnings.warn(
            "prefer is now called objective, and ampcompare 0.3 removes the old name; pass objective=",
            DeprecationWarning,
            stacklevel=2,
        )
    options = CompareOptions(
        settings=settings_request(recipe, size, config_file, with_script(settings, script, metrics, mask)),
        arms=_arms(arms, script),
        reference=reference,
        seeds=seeds if isinstance(seeds, str) or seeds is None else ",".join(map(str, seeds)),
        budget_seconds=to_seconds("budget", budget),
        sweep=tuple((find_setting(name, "sweep"), list(values)) for name, values in (sweep or {}).items()),
        margin=margin,
        time_margin=time_margin,
        loss_margin=loss_margin,
        looks=looks,
        objective=prefer or objective,
        profile=profile,
        tag=tag,
        jobs=jobs,
        gpus=gpus,
        timing_rounds=timing_rounds,
        fail_on=(fail_on,) if isinstance(fail_on, str) else tuple(fail_on),
        baseline=optional_path(baseline),
        output_dir=optional_path(output_dir),
        force=force,
        wait_seconds=wait_seconds(wait),
        tensorboard=optional_path(tensorboard),
        junit=optional_path(junit),
        launch=launch_options(launch, slurm_options),
        callbacks=loaded_callbacks(callbacks),
    )
    outcome = run_comparison(options, observer=default_observer(observer))
    outcome.write_junit()
    failures = [f"{check.arm}: {check.failure}" for check in outcome.checks if check.failure]
    if failures:
        raise GateFailed("; ".join(failures), outcome.comparison)
    return outcome.comparison


def _arms(arms: Sequence[str] | str, script: Sequence[str] | None) -> tuple[str, ...]:
    given = (arms,) if isinstance(arms, str) else tuple(arms)
    return given or (SCRIPT_ARMS if script is not None else ())
