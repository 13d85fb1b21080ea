"""Plans, and a launcher that trains nothing."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ampcompare.base.environment.fingerprint import environment_fingerprint
from ampcompare.experiment.launch.cell_files import write_record
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.matrix import Vary, cross_arms_with_settings
from ampcompare.experiment.plan import Plan, make_plan_of_rows
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.run import RunRecord, RunSummary
from ampcompare.settings.config import RunConfig

TOP1 = {"fp32": [50, 52, 51, 50, 53, 51, 52, 50], "half": [50, 53, 50, 51, 53, 50, 52, 51]}


def make_plan(base: RunConfig, arms: Sequence[str], seeds: Sequence[int], vary: Vary = ()) -> Plan:
    """Cross arms, varied settings and seeds over one recipe."""
    return make_plan_of_rows(base, cross_arms_with_settings(arms, vary), seeds)


class Pretend(Launcher):
    """Returns records without training, and keeps what it was asked for; seeds of `fail` fail."""

    fail: Sequence[int] = ()

    def __init__(self, seconds: float = 10.0, error: Exception | None = None, pause: float = 0.01) -> None:
        self.asked: list[RunConfig] = []
        self.most_at_once = 0
        self.seconds, self.error, self.pause = seconds, error, pause
        self.closed = False
        self._at_once = 0
        self._lock = threading.Lock()

    def correct(self, config: RunConfig) -> int:
        """Return how many of 1000 samples a cell has right."""
        return TOP1[config.arm.partition(":")[0]][config.recipe.seed % 8] * 10

    def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
        with self._lock:
            self.asked.append(config)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        if self.error is not None:
            raise self.error
        time.sleep(self.pause)
        epoch = EpochResult(
            epoch=0, samples=1000, top1_correct=self.correct(config), top5_correct=1000, loss=1.0, train_seconds=1,
            eval_seconds=0,
        )  # fmt: skip
        summary = RunSummary(
            metric_final=epoch.value, epochs=[epoch], num_steps=100, step_seconds_median=0.01,
            wall_seconds=self.seconds, peak_bytes=2**20,
        )  # fmt: skip
        record = RunRecord(
            cell=config.digest(), arm=config.arm, status="failed" if config.recipe.seed in self.fail else "completed",
            config=config, environment=environment_fingerprint(), summary=summary,
        )  # fmt: skip
        write_record(record, folder)
        with self._lock:
            self._at_once -= 1
        return record

    def close(self) -> None:
        self.closed = True
