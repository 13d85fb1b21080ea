"""Train one arm into a run directory: what both `ampcompare.run` and the command `run` call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ampcompare.base.errors import ConfigError, Ended
from ampcompare.experiment.follow import following
from ampcompare.experiment.observer import Observer, Outline
from ampcompare.experiment.options import RunOptions
from ampcompare.experiment.preflight import check_cells
from ampcompare.experiment.run import cell_folder, reusable
from ampcompare.experiment.run_folder import check_output_dir, check_output_name, owned
from ampcompare.experiment.verify_resume import Verification, verify_resume
from ampcompare.launch.base import Launcher
from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig

__all__ = ["RunOutcome", "check_run", "run_single", "verify_single"]

WhileRunning = Callable[[Launcher], AbstractContextManager[object]]


@dataclass(frozen=True)
class RunOutcome:
    """A run that has ended.

    Attributes:
        folder: the run directory.
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
    def log(self) -> Path:
        """The log of the run, or the folder with one per process."""
        cell = self.folder / "cells" / self.record.cell
        return cell / "log.txt" if self.record.config.processes == 1 else cell


def check_run(options: RunOptions) -> None:
    """Refuse what certainly cannot run.

    Raises:
        ConfigError: a name, a file or an output folder that cannot be used.
        EnvironmentUnfit: this machine lacks something that was requested.
    """
    options.launch.check({options.config.launcher})
    check_cells([options.config])
    check_output_name(options.folder)


def run_single(
    options: RunOptions, *, observer: Observer | None = None, while_running: WhileRunning = nullcontext
) -> RunOutcome:
    """Train one arm, or return its existing record.

    Args:
        observer: receives progress and notes in the main process.
        while_running: a context around the run, given the launcher; the command line handles signals in it.

    Raises:
        ConfigError: settings that cannot be used, or another command uses the folder.
        EnvironmentUnfit: this machine lacks something that was requested.
        LaunchError: no process could be started.
        KeyboardInterrupt: passed on.
    """
    launcher, observer = _launcher(options, observer)
    observer = following(observer, options.callbacks if launcher.is_main else ())
    with launcher, _owned(options, options.folder, launcher, observer), while_running(launcher):
        try:
            record = _train(options, launcher, observer)
        except (KeyboardInterrupt, Ended):
            if message := launcher.pending_message():
                observer.note(message)
            raise
        for resumption in record.resumed[-1:]:
            observer.note("; ".join([f"resumed from a checkpoint of step {resumption.step}", *resumption.notes]))
    return RunOutcome(record, options.folder, launcher.is_main)


def verify_single(
    options: RunOptions, *, observer: Observer | None = None, while_running: WhileRunning = nullcontext
) -> Verification:
    """Train without and with a stop and a checkpoint, and compare bit for bit.

    Raises:
        ConfigError: as for `run_single`, or the run is too short to be stopped.
        LaunchError: one of the runs failed.
    """
    launcher, observer = _launcher(options, observer)
    with launcher, _owned(options, options.folder, launcher, observer), while_running(launcher):
        return verify_resume(options.config, options.folder / "verify-resume", launcher, observer=observer)


def _launcher(options: RunOptions, observer: Observer | None) -> tuple[Launcher, Observer]:
    """Return the launcher, and an observer that is silent in all but the main process."""
    config = options.config
    check_run(options)
    if config.saving.apex_layout and not config.arm.startswith("apex"):
        raise ConfigError(f"--save-apex-format is what an Apex script saves, and the arm is {config.arm}; leave it out")
    launcher = options.launch.launcher(config)
    return launcher, observer if observer is not None and launcher.is_main else Observer()


def _owned(options: RunOptions, folder: Path, launcher: Launcher, observer: Observer) -> AbstractContextManager[None]:
    return owned(folder, launcher, command=options.command, wait_seconds=options.wait_seconds, note=observer.note)


def _train(options: RunOptions, launcher: Launcher, observer: Observer) -> RunRecord:
    config, folder = options.config, options.folder
    check_output_dir(folder)
    launcher.on_note = observer.note
    earlier = None if options.force else reusable(folder, config)
    if earlier is not None and earlier.reason:
        observer.note(f"{config.arm} runs again: {earlier.reason}")
    reused = earlier.record if earlier is not None else None
    observer.plan(Outline([config], [config.arm], [reused], folder))
    observer.begin(config, 1, 1)
    record = reused or _launch(config, cell_folder(folder, config), launcher, observer)
    observer.end(record, reused=reused is not None)
    return record


def _launch(config: RunConfig, folder: Path, launcher: Launcher, observer: Observer) -> RunRecord:
    if not launcher.is_queue(config):
        return launcher.launch(config, folder, partial(observer.progress, 1))
    cells = launcher.collect(
        [(config, folder)],
        lambda index, name: observer.place(1, name),
        lambda index, progress: observer.progress(1, progress),
    )
    return next(cells)[1]
