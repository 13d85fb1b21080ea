"""Cells on this machine, whatever each needs: a fork, several ranks, or a user's script."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ampcompare.base.environment.ranks import DistributedEnv
from ampcompare.base.errors import ConfigError
from ampcompare.base.files.run_files import log_name
from ampcompare.experiment.launch.cell_files import move_run_to_previous, write_config, write_record
from ampcompare.experiment.launch.contract import (
    Launcher,
    LauncherClosed,
    Progress,
    record_of_interrupted_cell,
)
from ampcompare.experiment.launch.forked import ForkedLauncher
from ampcompare.experiment.launch.multi_process import MultiProcessLauncher
from ampcompare.experiment.launch.places import ANYWHERE, Place
from ampcompare.results.records.run import FallbackArm, RunRecord
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import build_validated_model


class ExternalLauncher(Launcher):
    """Joins externally launched ranks. Single-use: O1 patches torch permanently.

    Attributes:
        is_main: whether this process prints the results: rank 0, or the rank that failed first.
    """

    def __init__(self, world: DistributedEnv) -> None:
        self.world = world
        self.is_main = world.rank == 0

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        """Train as one of the ranks; see `Launcher.launch`."""
        from ampcompare.experiment.launch.worker.rank import train_as_one_rank

        if config.processes != self.world.size:
            raise ConfigError(
                f"the settings are for {config.processes} processes, but {self.world.size} were started; leave the "
                f"number out of the settings"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if self.world.rank == 0:
            move_run_to_previous(folder)
            write_config(config, folder)
        record, self.is_main = train_as_one_rank(
            config, folder, self.world, on_progress, log=folder / log_name(self.world.rank)
        )
        return record


class LocalLauncher(Launcher):
    """Trains cells one at a time, each as it needs, and a diverged one again under its fallback arms.

    Each of its launchers is made at its first use.
    """

    def __init__(self, place: Place = ANYWHERE) -> None:
        self._place = place
        self._launchers: dict[str, Launcher] = {}
        self._is_closed = False

    def launcher_of(self, config: RunConfig) -> Launcher:
        """Return the launcher for a cell."""
        if config.stack is not None:
            from ampcompare.experiment.launch.script.stacks import StackLauncher

            return self._ensure_launcher_of_kind("stack", lambda: StackLauncher(self._place))
        if config.script is not None:
            from ampcompare.experiment.launch.script.launcher import ScriptLauncher  # it imports torch

            return self._ensure_launcher_of_kind("script", lambda: ScriptLauncher(self._place))
        if config.launcher not in ("torchrun", "spawn") and config.processes == 1:
            return self._ensure_launcher_of_kind("fork", lambda: ForkedLauncher(self._place))
        kind: Literal["torchrun", "spawn"] = "torchrun" if config.launcher == "torchrun" else "spawn"
        return self._ensure_launcher_of_kind(kind, lambda: MultiProcessLauncher(kind, place=self._place))

    def _ensure_launcher_of_kind(self, kind: str, make: Callable[[], Launcher]) -> Launcher:
        if kind not in self._launchers:
            self._launchers[kind] = launcher = make()
            launcher.on_note = self.report_note
            launcher.may_start = lambda: self.may_start()
        return self._launchers[kind]

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        if not self.may_start():
            return record_of_interrupted_cell(config)
        record = self._launch_with_first_weights(config, folder, on_progress)
        return (
            self._train_under_fallback_arms(config, folder, on_progress, record)
            if config.fallback_arms
            else record
        )

    def _launch_with_first_weights(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None
    ) -> RunRecord:
        launcher = self.launcher_of(config)
        if self._is_closed:  # before it was created
            raise LauncherClosed
        if config.script is not None and config.script.first_weights is not None:
            from ampcompare.experiment.launch.script.stacks import FirstWeightsLauncher

            weights = self._ensure_launcher_of_kind("weights", lambda: FirstWeightsLauncher(self._place))
            assert isinstance(weights, FirstWeightsLauncher)
            if (record := weights.record_first_weights_once_per_seed(config, folder)) is not None:
                return record
        return launcher.launch(config, folder, on_progress)

    def _train_under_fallback_arms(
        self,
        config: RunConfig,
        folder: Path,
        on_progress: Callable[[Progress], None] | None,
        record: RunRecord,
    ) -> RunRecord:
        """Train a cell that has diverged again from its start under the next arms, until one does not diverge."""
        diverged: dict[str, int] = {}
        trained = config.arm
        for arm in config.fallback_arms:
            if record.status != "diverged" or not self.may_start():
                break
            diverged[trained] = record.summary.diverged_step or 0
            self.report_note(
                f"{trained}, seed {config.recipe.seed}, has diverged at step {diverged[trained]}: now {arm}"
            )
            trained = arm
            other = build_validated_model(RunConfig, {**config.model_dump(), "arm": arm, "on_nan": "stop"})
            record = self._launch_with_first_weights(other, folder, on_progress)
        if not diverged:
            return record
        found = FallbackArm(arm=trained, diverged=diverged)
        names = {"cell": config.digest(), "arm": config.arm, "config": config, "fell_back": found}
        record = record.model_copy(update=names)
        write_config(config, folder)
        write_record(record, folder)
        return record

    def ask_cell_to_stop(self) -> bool:
        return sum(launcher.ask_cell_to_stop() for launcher in list(self._launchers.values())) > 0

    def end_cell(self) -> None:
        for launcher in list(self._launchers.values()):
            launcher.end_cell()

    def close(self) -> None:
        self._is_closed = True
        for launcher in list(self._launchers.values()):
            launcher.close()
