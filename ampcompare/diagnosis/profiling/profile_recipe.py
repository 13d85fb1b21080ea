"""The profile of an arm on a recipe, as plain data. Runs in a child process: O1 patches torch."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ampcompare.base.errors import AmpCompareError, UnsupportedCombination
from ampcompare.diagnosis.loops import make_recipe_loop
from ampcompare.diagnosis.profiling.measure import (
    Loop,
    ProfiledPrecision,
    profile_from_steps,
    train_loop_under_step_profiler,
)
from ampcompare.diagnosis.profiling.reasons import BATCH, seconds_without_emulation
from ampcompare.diagnosis.profiling.step_profiler import StepCounts
from ampcompare.results.records.evaluation import emulated_type
from ampcompare.results.records.profile import ArmProfile, TimedChange
from ampcompare.settings.config import RunConfig
from ampcompare.settings.examination import return_user_errors
from ampcompare.settings.layers import set_value_at_path
from ampcompare.settings.validation import build_validated_model
from ampcompare.training.assemble import cpu_half_mode_of_run
from ampcompare.training.process.switches import configure_examining_process, configure_process

NEVER = 1_000_000  # steps between two reads of losses: none in a profile
TRIAL_STEPS = StepCounts(warmup=2, timed=4, profiled=0, watched=0)
MIN_OPTIMIZER = 0.10
MIN_DATA = 0.15
MIN_OVERHEAD = 0.15
FUSED = ("sgd", "adam", "adamw", "adagrad")
ROUNDS = 2
MORE = 4  # times the batch


def _recipe_loop_without_end(config: RunConfig, device: torch.device) -> Loop:
    """Return the loop of the recipe, which trains epoch after epoch until it is stopped."""
    return make_recipe_loop(
        config, device, epochs=itertools.count(), batches_of=ProfiledPrecision.time_batches, drain_every=NEVER
    )


def profile_and_trace_of_config(
    config: RunConfig, steps: StepCounts, device: torch.device, *, trials: bool
) -> tuple[ArmProfile, dict[str, Any]]:
    """Return the profile of the arm of a configuration in this process, which is set up, and its trace.

    The profile has no reasons yet.
    """
    is_compiled = config.recipe.compile != "none"
    if is_compiled:  # a dispatch mode would see the operations of a compiled graph only as it is traced
        steps = StepCounts(steps.warmup, steps.timed, steps.profiled, watched=0)
        torch._dynamo.utils.counters.clear()
    half = cpu_half_mode_of_run(config.cpu_half, config.recipe.compile)
    arm = config.parsed_arm
    seed, lists = config.recipe.seed, config.autocast_lists
    profiler, half_dtype, mode = train_loop_under_step_profiler(
        _recipe_loop_without_end(config, device), arm, steps, device, half=half, lists=lists, seed=seed
    )
    found = profile_from_steps(arm, profiler, half_dtype, mode)
    changes: dict[str, Any] = {"batch_size": config.recipe.batch_size}
    if is_compiled:
        changes["graph_breaks"] = graph_break_counts()
        changes["notes"] = [*found.notes, "memory and FLOPs of a compiled model are not counted"]
    found = found.model_copy(update=changes)
    if trials and not emulated_type(mode):  # times of an emulation are no measure

        def measure_step(tried: RunConfig) -> float:
            configure_process(tried, device)
            profiler, *_ = train_loop_under_step_profiler(
                _recipe_loop_without_end(tried, device),
                tried.parsed_arm,
                TRIAL_STEPS,
                device,
                half=half,
                lists=lists,
                seed=seed,
            )
            return profiler.measured.step_seconds

        found = found.model_copy(
            update={"trials": time_config_variants(config, changes_worth_timing(config, found), measure_step)}
        )
    return found, profiler.measured.trace


def graph_break_counts() -> dict[str, int]:
    """Return why torch.compile broke graphs of this process, with the number of places."""
    counted: dict[str, int] = {}
    for reason, count in torch._dynamo.utils.counters["graph_break"].items():
        first = str(reason).strip().splitlines()[0][:160]
        counted[first] = counted.get(first, 0) + int(count)
    return counted


@return_user_errors
def profile_recipe(
    config: dict[str, Any], steps: int, profiled: int, trials: bool, trace: str
) -> dict[str, Any]:
    """Profile the arm and recipe of a configuration; `trace` is the file for the trace."""
    settings, device = configure_examining_process(config)
    found, events = profile_and_trace_of_config(
        settings, StepCounts(timed=steps, profiled=profiled), device, trials=trials
    )
    Path(trace).write_text(json.dumps(events), encoding="utf-8")
    return found.model_dump(mode="json")


@dataclass(frozen=True)
class _ConfigWithOneChange:
    """A configuration with one change; `work` is the number of steps of the arm that one of its steps does."""

    change: str
    config: RunConfig
    work: float = 1.0


def changes_worth_timing(config: RunConfig, profile: ArmProfile) -> Iterator[_ConfigWithOneChange]:
    """Yield the changes that what was measured suggests."""
    recipe, whole = config.recipe, seconds_without_emulation(profile)
    if profile.phase_seconds("optimizer") / whole >= MIN_OPTIMIZER and "fused" not in profile.optimizer:
        names = ["foreach"] if "foreach" not in profile.optimizer else []
        for name in [*(["fused"] if recipe.optimizer.name in FUSED else []), *names]:
            yield from _changes_of_setting(
                config, f"--optimizer-implementation {name}", "recipe.optimizer.implementation", name
            )
    if profile.phase_seconds("data") / whole >= MIN_DATA and not config.workers:
        yield from _changes_of_setting(config, "--workers 2", "workers", 2)
    overhead = (
        profile.seconds_of_kind("host")
        + profile.seconds_of_kind("other")
        + profile.phase_seconds("optimizer")
    )
    # refused by the data if they have no such batch
    if overhead / whole >= MIN_OVERHEAD and recipe.compile == "none":
        size = MORE * recipe.batch_size
        yield from _changes_of_setting(config, f"{BATCH} {size}", "recipe.batch_size", size, work=MORE)


def _changes_of_setting(
    config: RunConfig, name: str, path: str, value: object, *, work: float = 1.0
) -> Iterator[_ConfigWithOneChange]:
    data = config.model_dump(mode="json")
    set_value_at_path(data, path, value)
    with suppress(AmpCompareError):
        yield _ConfigWithOneChange(name, build_validated_model(RunConfig, data), work)


def time_config_variants(
    config: RunConfig, variants: Iterable[_ConfigWithOneChange], measure_step: Callable[[RunConfig], float]
) -> list[TimedChange]:
    """Train the arm and each variant in turns, some rounds, and return the fastest step of both.

    A change that the model, the data or the optimizer does not have gives no trial.
    """
    trials = []
    for variant in variants:
        before, after = [], []
        try:
            for _ in range(ROUNDS):
                before.append(measure_step(config))
                after.append(measure_step(variant.config) / variant.work)
        except UnsupportedCombination:
            continue
        except (AmpCompareError, RuntimeError, TypeError, ValueError) as error:
            trials.append(
                TimedChange(change=variant.change, before_seconds=0, seconds=0, failure=f"{error}"[:200])
            )
            continue
        is_apart = max(after) < min(before) or min(after) > max(before)  # else as two equal runs do
        seconds = min(after) if is_apart else min(before)
        trials.append(TimedChange(change=variant.change, before_seconds=min(before), seconds=seconds))
    return trials
