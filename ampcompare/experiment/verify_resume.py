"""Verify that a run that stops and resumes from its checkpoint equals an uninterrupted one, bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.run_folder import check_output_dir
from ampcompare.launch.base import Launcher
from ampcompare.records.run import RunRecord
from ampcompare.records.step import iter_steps
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import validated

__all__ = ["Verification", "verify_resume"]

MEASURED = ("seconds", "data_seconds", "train_seconds", "eval_seconds")


@dataclass(frozen=True)
class Verification:
    """The result of comparing the two runs.

    Attributes:
        step: updates after which one of them stopped.
        steps: updates of the whole run.
        difference: the first one, by name; "" if there is none.
    """

    step: int
    steps: int
    difference: str


def verify_resume(
    config: RunConfig, folder: Path, launcher: Launcher, *, observer: Observer | None = None
) -> Verification:
    """Train without a break, then again with one after a step drawn from the settings, and compare.

    The log interval is one step, so that the run can stop after any step.

    Args:
        folder: for both runs, in `unbroken` and `resumed`.

    Raises:
        ConfigError: the run is too short to be stopped.
        LaunchError: one of the runs failed.
    """
    check_output_dir(folder)
    observer = observer or Observer()
    launcher.on_note = observer.note
    unbroken, resumed = folder / "unbroken", folder / "resumed"
    whole = _train(config, unbroken, launcher, observer, 1)
    steps = whole.summary.num_steps
    if steps < 2:
        raise ConfigError(
            f"the run has {steps} updates, but --verify-resume needs at least 2 to stop in between; use more --epochs"
        )
    step = random.Random(config.digest()).randrange(1, steps)
    _train(config, resumed, launcher, observer, 2, stop_at_step=step)
    again = _train(config, resumed, launcher, observer, 3, resume="auto")
    difference = _of_steps(unbroken, resumed) or _of_results(whole, again) or _of_states(unbroken, resumed)
    return Verification(step, steps, difference)


def _train(
    config: RunConfig, folder: Path, launcher: Launcher, observer: Observer, number: int, **saving: Any
) -> RunRecord:
    values = config.model_dump()
    values["drain_every"] = 1
    form = config.saving.format
    values["saving"] = {"every_epochs": config.recipe.epochs, "keep_last": 1, "format": form, **saving}
    config = validated(RunConfig, values)
    observer.begin(config, number, 3)
    record = launcher.launch(config, folder, partial(observer.progress, number))
    observer.end(record, reused=False)
    if record.status == "failed":
        raise LaunchError(f"{config.arm} failed: {record.error}")
    return record


def _of_steps(one: Path, other: Path) -> str:
    for first, second in zip_longest(iter_steps(one / "steps.jsonl"), iter_steps(other / "steps.jsonl")):
        if first is None or second is None:
            return f"step {(first or second).step} is only in the {'second' if first is None else 'first'} run"
        for name in first._fields:
            values = getattr(first, name), getattr(second, name)
            if name not in MEASURED and repr(values[0]) != repr(values[1]):
                return f"step {first.step}: {name} is {values[0]}, then {values[1]}"
    return ""


def _of_results(one: RunRecord, other: RunRecord) -> str:
    for first, second in zip(one.summary.epochs, other.summary.epochs, strict=True):
        results = [epoch.model_dump(exclude=set(MEASURED)) for epoch in (first, second)]
        for name, value in results[0].items():
            if repr(value) != repr(results[1][name]):
                return f"epoch {first.epoch}: {name} is {value}, then {results[1][name]}"
    if one.status != other.status:
        return f"the run {one.status}, then {other.status}"
    return ""


def _of_states(one: Path, other: Path) -> str:
    """Compare the contents of the last checkpoints; a diverged run leaves none at its end."""
    from ampcompare.checkpoint.store.difference import first_difference
    from ampcompare.checkpoint.store.folder import CheckpointFolder

    ends = [CheckpointFolder(folder / "checkpoints").newest() for folder in (one, other)]
    if ends[0] is None or ends[1] is None:
        return ""
    return first_difference(ends[0][1], ends[1][1], apart=(*MEASURED, "resumed"))
