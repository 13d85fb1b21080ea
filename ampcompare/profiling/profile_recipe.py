"""The profile of an arm on a recipe, as plain data. Runs in a child process: O1 patches torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ampcompare.base.errors import AmpCompareError, UnsupportedCombination
from ampcompare.precision.tf32 import set_tf32
from ampcompare.profiling.measure import Loop, measure_loop, profile_of
from ampcompare.profiling.profiled_precision import ProfiledPrecision
from ampcompare.profiling.step_profiler import Steps
from ampcompare.profiling.trials import run_trials
from ampcompare.records.profile import ArmProfile
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import validated
from ampcompare.tasks.registry import make_task
from ampcompare.training.assemble import assemble_single
from ampcompare.training.build_loop import build_loop
from ampcompare.training.compile import cpu_half_of
from ampcompare.training.device import resolve_device

__all__ = ["profile_config", "profile_recipe", "recipe_loop"]

NEVER = 1_000_000  # steps between two reads of losses: none in a profile
TRIAL_STEPS = Steps(warmup=2, timed=4, profiled=0, watched=False)


def recipe_loop(config: RunConfig, device: torch.device) -> Loop:
    """Return the loop: it assembles the run of the recipe, and trains epoch after epoch until it is stopped."""
    recipe = config.recipe
    task = make_task(recipe)

    def train(precision: ProfiledPrecision) -> None:
        if config.parallel.kind == "fsdp":
            raise UnsupportedCombination(
                f"profile trains a recipe in one process, but {config.arm} shards its weights over several"
            )
        assembly = assemble_single(recipe, task, precision, device)
        loop = build_loop(recipe, assembly, precision, drain_every=NEVER)
        epoch = 0
        while True:
            batches = task.data.train_batches(
                epoch, recipe.batch_size, device=device, workers=config.workers, pin_memory=config.pin_memory
            )
            for _ in loop.run(precision.batches(batches), epoch=epoch):
                pass
            epoch += 1

    return train


def profile_config(config: RunConfig, steps: Steps, *, trials: bool) -> tuple[ArmProfile, dict[str, Any]]:
    """Return the profile of the arm of a configuration in this process, without reasons, and its trace.

    Raises:
        AmpCompareError: a setting or the device does not fit.
    """
    device = resolve_device(config.device)
    if config.tf32 != "torch":
        set_tf32(config.tf32 == "on")
    if config.recipe.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    is_compiled = config.recipe.compile != "none"
    if is_compiled:  # a dispatch mode would see the operations of a compiled graph only as it is traced
        steps = Steps(steps.warmup, steps.timed, steps.profiled, watched=False)
        torch._dynamo.utils.counters.clear()
    half = cpu_half_of(config.cpu_half, config.recipe.compile)
    arm = config.parsed_arm
    seed = config.recipe.seed
    measured, precision, profiler, mode = measure_loop(
        recipe_loop(config, device), arm, steps, device, half=half, seed=seed
    )
    found = profile_of(arm, measured, precision.half_dtype, profiler, mode, device)
    changes: dict[str, Any] = {"batch_size": config.recipe.batch_size}
    if is_compiled:
        changes["graph_breaks"] = graph_breaks()
        changes["notes"] = [*found.notes, "memory and FLOPs of a compiled model are not counted"]
    found = found.model_copy(update=changes)
    if trials and "emulated" not in (mode or ""):  # times of an emulation are no measure
        found = found.model_copy(update={"trials": run_trials(config, found, _timer(device, half))})
    return found, measured.trace


def _timer(device: torch.device, half: str) -> Callable[[RunConfig], float]:
    def time_step(config: RunConfig) -> float:
        torch.backends.cudnn.benchmark = config.recipe.cudnn_benchmark
        loop = recipe_loop(config, device)
        measured, *_ = measure_loop(loop, config.parsed_arm, TRIAL_STEPS, device, half=half, seed=config.recipe.seed)
        return measured.step_seconds

    return time_step


def graph_breaks() -> dict[str, int]:
    """Return why torch.compile broke graphs of this process, with the number of places."""
    counted: dict[str, int] = {}
    for reason, count in torch._dynamo.utils.counters["graph_break"].items():
        first = str(reason).strip().splitlines()[0][:160]
        counted[first] = counted.get(first, 0) + int(count)
    return counted


def profile_recipe(config: dict[str, Any], steps: int, profiled: int, trials: bool, trace: str) -> dict[str, Any]:
    """Profile the arm and recipe of a configuration.

    Errors meant for users come back as `{"error": ..., "exit_code": ...}`.

    Args:
        trace: file for the trace; "" writes none.
    """
    try:
        settings = validated(RunConfig, config)
        torch.set_num_threads(settings.threads)
        found, events = profile_config(settings, Steps(timed=steps, profiled=profiled), trials=trials)
    except AmpCompareError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    if trace:
        Path(trace).write_text(json.dumps(events), encoding="utf-8")
    return found.model_dump(mode="json")
