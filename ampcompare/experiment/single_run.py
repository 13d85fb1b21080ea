"""Train one arm into a run directory: what both `ampcompare.run` and the command `run` call.

Or verify that a run which stops and resumes from its checkpoint equals an uninterrupted one, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ampcompare.base.errors import ConfigError, Ended, LaunchError
from ampcompare.base.files.run_files import CellFile, RunFile
from ampcompare.base.option_rules import refuse_broken_rules
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.observer import Observer, PlanOutline
from ampcompare.experiment.option_checks import check_cells
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.run_options import RUN_RULES, RunOptions
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.step import iter_steps
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import build_validated_model

MEASURED = ("seconds", "data_seconds", "train_seconds", "eval_seconds")
WhileRunning = Callable[[Launcher], AbstractContextManager[object]]


@dataclass(frozen=True)
class RunOutcome:
    """A run that has ended.

    Attributes:
        is_main: whether this process reports results, and not another rank or node of the same command.
    """

    record: RunRecord
    folder: Path
    is_main: bool = True

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.record.status == "interrupted":
            return Ended.exit_code
        return int(self.record.environment.get("exit_code", 3)) if self.record.status == "failed" else 0

    @property
    def cell_folder(self) -> Path:
        """The folder of its cell."""
        return RunDirectory(self.folder).cell_folder_of_digest(self.record.cell)

    @property
    def log_path(self) -> Path:
        """The log of the run, or the folder with one per process."""
        return self.cell_folder / CellFile.LOG if self.record.config.processes == 1 else self.cell_folder


def check_run_options(options: RunOptions) -> None:
    """Refuse what certainly cannot run."""
    config = options.config
    given = {
        "slurm_options": options.launch.slurm_options,
        "launchers": {config.launcher},
        "jobs": None,
        "apex_layout": config.saving.apex_layout,
        "calls_apex": config.parsed_arm.spec.calls_apex,
    }
    refuse_broken_rules(RUN_RULES, given)
    check_cells([config])
    RunDirectory(options.folder).check_name()


def run_single(
    options: RunOptions, *, observer: Observer | None = None, while_running: WhileRunning = nullcontext
) -> RunOutcome:
    """Train one arm, or return its existing record.

    Args:
        options: the configuration, and how its cell is started.
        observer: receives progress and notes in the main process.
        while_running: a context around the run, given the launcher; the command line handles signals in it.

    Raises:
        ConfigError: an option that does not act here, or a run directory that is in use.
        LaunchError: no process could be started.
    """
    launcher, observer = _launcher_and_observer(options, observer)
    with launcher, _run_directory_held(options, launcher), while_running(launcher):
        try:
            record = _train_or_reuse_cell(options, launcher, observer)
        except (KeyboardInterrupt, Ended):
            if message := launcher.pending_message():
                observer.note(message)
            raise
        for resumption in record.resumed[-1:]:
            observer.note(
                "; ".join([f"resumed from a checkpoint of step {resumption.step}", *resumption.notes])
            )
    return RunOutcome(record, options.folder, launcher.is_main)


def verify_resume_of_run(
    options: RunOptions, *, observer: Observer | None = None, while_running: WhileRunning = nullcontext
) -> ResumeVerification:
    """Train without and with a stop and a checkpoint, and compare bit for bit.

    Args:
        options: of the run; its folder also holds both trainings.
        observer: shows progress; None shows none.
        while_running: returns a context in which both train, from their launcher.

    Raises:
        ConfigError: the settings cannot be run, or leave no step to stop after.
        LaunchError: a training failed.
    """
    launcher, observer = _launcher_and_observer(options, observer)
    with launcher, _run_directory_held(options, launcher), while_running(launcher):
        return verify_resume(
            options.config, options.folder / RunFile.VERIFY_RESUME, launcher, observer=observer
        )


def _launcher_and_observer(options: RunOptions, observer: Observer | None) -> tuple[Launcher, Observer]:
    """Return the launcher, and an observer that is silent in all but the main process."""
    config = options.config
    check_run_options(options)
    launcher = options.launch.launcher_of_cell(config)
    return launcher, observer if observer is not None and launcher.is_main else Observer()


def _run_directory_held(options: RunOptions, launcher: Launcher) -> AbstractContextManager[None]:
    return RunDirectory(options.folder).with_lock(launcher, command=options.command)


def _train_or_reuse_cell(options: RunOptions, launcher: Launcher, observer: Observer) -> RunRecord:
    config, run = options.config, RunDirectory(options.folder)
    run.make()
    launcher.on_note = observer.note
    if config.stack is not None:
        # it imports torch
        from ampcompare.experiment.launch.script.stacks import write_record_of_recorded_cell

        write_record_of_recorded_cell(config, run.cell_folder(config), observer.note)
    earlier = None if options.force else run.find_reusable_record_and_reason(config)
    if earlier is not None and earlier.reason:
        observer.note(f"{config.arm} runs again: {earlier.reason}")
    reused = earlier.record if earlier is not None else None
    observer.plan(PlanOutline([config], [config.arm_with_stack], [reused], run.path))
    observer.begin(config, 1, 1)
    record = reused or _launch_cell(config, run.cell_folder(config), launcher, observer)
    observer.end(record, reused=reused is not None)
    return record


def _launch_cell(config: RunConfig, folder: Path, launcher: Launcher, observer: Observer) -> RunRecord:
    if not launcher.is_queue(config):
        return launcher.launch(config, folder, partial(observer.progress, 1))
    cells = launcher.collect_records(
        [(config, folder)],
        lambda index, name: observer.place(1, name),
        lambda index, progress: observer.progress(1, progress),
    )
    return next(cells)[1]


@dataclass(frozen=True)
class ResumeVerification:
    """After which of all updates one run stopped, and the first difference between both by name; "" if none."""

    step: int
    steps: int
    difference: str


def verify_resume(
    config: RunConfig, folder: Path, launcher: Launcher, *, observer: Observer | None = None
) -> ResumeVerification:
    """Train without a break, then again with one after a step drawn from the settings, and compare.

    The log interval is one step, so that the run can stop after any step.
    """
    RunDirectory(folder).make()
    observer = observer or Observer()
    launcher.on_note = observer.note
    unbroken, resumed = (folder / name for name in RunFile.VERIFIED)
    whole = _train_cell_keeping_checkpoint(config, unbroken, launcher, observer, 1)
    steps = whole.summary.num_steps
    if steps < 2:
        raise ConfigError(
            f"the run has {steps} updates, but --verify-resume needs at least 2 to stop in between; use more --epochs"
        )
    step = random.Random(config.digest()).randrange(1, steps)
    _train_cell_keeping_checkpoint(config, resumed, launcher, observer, 2, stop_at_step=step)
    again = _train_cell_keeping_checkpoint(config, resumed, launcher, observer, 3, resume="auto")
    difference = (
        _step_difference_text(unbroken, resumed)
        or _result_difference_text(whole, again)
        or _last_checkpoint_difference_text(unbroken, resumed)
    )
    return ResumeVerification(step, steps, difference)


def _train_cell_keeping_checkpoint(
    config: RunConfig, folder: Path, launcher: Launcher, observer: Observer, number: int, **saving: Any
) -> RunRecord:
    values = config.model_dump()
    values["drain_every"] = 1
    values["saving"] = {"every_epochs": config.recipe.epochs, "keep_last": 1, **saving}
    config = build_validated_model(RunConfig, values)
    observer.begin(config, number, 3)
    record = launcher.launch(config, folder, partial(observer.progress, number))
    observer.end(record, reused=False)
    if record.status == "failed":
        raise LaunchError(f"{config.arm} failed: {record.error}")
    return record


def _step_difference_text(one: Path, other: Path) -> str:
    for first, second in zip_longest(*(iter_steps(folder / CellFile.STEPS) for folder in (one, other))):
        if first is None or second is None:
            return (
                f"step {(first or second).step} is only in the {'second' if first is None else 'first'} run"
            )
        for name in first._fields:
            values = getattr(first, name), getattr(second, name)
            if name not in MEASURED and repr(values[0]) != repr(values[1]):
                return f"step {first.step}: {name} is {values[0]}, then {values[1]}"
    return ""


def _result_difference_text(one: RunRecord, other: RunRecord) -> str:
    for first, second in zip(one.summary.epochs, other.summary.epochs, strict=True):
        results = [epoch.model_dump(exclude=set(MEASURED)) for epoch in (first, second)]
        for name, value in results[0].items():
            if repr(value) != repr(results[1][name]):
                return f"epoch {first.epoch}: {name} is {value}, then {results[1][name]}"
    if one.status != other.status:
        return f"the run {one.status}, then {other.status}"
    return ""


def _last_checkpoint_difference_text(one: Path, other: Path) -> str:
    """Compare the contents of the last checkpoints; a diverged run leaves none at its end."""
    from ampcompare.base.tensors.tree import first_difference_text
    from ampcompare.checkpoints.store.folder import CheckpointFolder

    ends = [
        CheckpointFolder(folder / CellFile.CHECKPOINTS).read_newest_path_state_and_notes()
        for folder in (one, other)
    ]
    if ends[0] is None or ends[1] is None:
        return ""
    return first_difference_text(ends[0][1], ends[1][1], ignored_keys=(*MEASURED, "resumed"))
