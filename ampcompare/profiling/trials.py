"""Switches that may help an arm, each trained in turns with the arm as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import AmpCompareError
from ampcompare.profiling.reasons import BATCH, work_of
from ampcompare.records.profile import ArmProfile, Trial
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import validated

__all__ = ["Variant", "run_trials", "variants"]

MIN_OPTIMIZER = 0.10
MIN_CONVOLUTION = 0.20
MIN_DATA = 0.15
MIN_NORM = 0.10
MIN_OVERHEAD = 0.15
FUSED = ("sgd", "adam", "adamw", "adagrad")
ROUNDS = 2
MORE = 4  # times the batch


@dataclass(frozen=True)
class Variant:
    """A configuration with one change; `work` is the number of steps of the arm that one of its steps does."""

    change: str
    config: RunConfig
    work: float = 1.0


def variants(config: RunConfig, found: ArmProfile) -> Iterator[Variant]:
    """Yield the changes that what was measured suggests."""
    recipe, whole = config.recipe, work_of(found)
    if found.of_phase("optimizer") / whole >= MIN_OPTIMIZER and "fused" not in found.optimizer:
        names = ["foreach"] if "foreach" not in found.optimizer else []
        for name in [*(["fused"] if recipe.optimizer.name in FUSED else []), *names]:
            yield from _changed(config, f"--optimizer-implementation {name}", {"recipe.optimizer.implementation": name})
    convolutions = sum(one.seconds for one in found.operations if "conv" in one.name)
    if convolutions / whole >= MIN_CONVOLUTION and found.formats.get("NCHW"):
        yield from _changed(config, "--channels-last", {"recipe.channels_last": True})
        if found.device != "cpu" and not recipe.cudnn_benchmark:
            yield from _changed(config, "--cudnn-benchmark", {"recipe.cudnn_benchmark": True})
    if found.of_phase("data") / whole >= MIN_DATA and not config.workers:
        yield from _changed(config, "--workers 2", {"workers": 2})
    overhead = found.of_kind("host") + found.of_kind("other") + found.of_phase("optimizer")
    if overhead / whole >= MIN_OVERHEAD and recipe.compile == "none":  # refused by the data if they have no such batch
        yield from _changed(
            config, f"{BATCH} {MORE * recipe.batch_size}", {"recipe.batch_size": MORE * recipe.batch_size}, work=MORE
        )
    norms = sum(one.seconds for one in found.operations if "batch_norm" in one.name and one.dtype == "fp32")
    arm = config.parsed_arm
    if norms / whole >= MIN_NORM and arm.backend == "apex" and arm.options.get("opt_level") in ("O2", "O5"):
        changed = Arm.make(arm.backend, **{**arm.options, "keep_batchnorm_fp32": False})
        yield from _changed(config, "keep_batchnorm_fp32=False", {"arm": str(changed)})


def _changed(config: RunConfig, name: str, values: dict[str, Any], *, work: float = 1.0) -> Iterator[Variant]:
    data = config.model_dump(mode="json")
    for path, value in values.items():
        *folders, last = path.split(".")
        place = data
        for folder in folders:
            place = place[folder]
        place[last] = value
    try:
        yield Variant(name, validated(RunConfig, data), work)
    except AmpCompareError:
        return


def run_trials(config: RunConfig, found: ArmProfile, time_step: Callable[[RunConfig], float]) -> list[Trial]:
    """Train the arm and each variant in turns, some rounds, and return the fastest step of both.

    Args:
        time_step: trains some steps of a configuration and returns the seconds of one.
    """
    trials = []
    for variant in variants(config, found):
        before, after = [], []
        try:
            for _ in range(ROUNDS):
                before.append(time_step(config))
                after.append(time_step(variant.config))
        except (AmpCompareError, RuntimeError, TypeError, ValueError) as error:
            trials.append(Trial(change=variant.change, before_seconds=0, seconds=0, failure=f"{error}"[:200]))
            continue
        best = min(after) / variant.work
        # A gain counts only where every round of the change is faster than every one of the arm as it is.
        gained = best if max(after) / variant.work < min(before) else max(best, min(before))
        trials.append(Trial(change=variant.change, before_seconds=min(before), seconds=gained))
    return trials
