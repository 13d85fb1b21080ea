"""Comparisons of records that no process has to train for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ampcompare.runs.analysis.summary import summarize
from ampcompare.runs.records.comparison import Comparison
from ampcompare.runs.records.evaluation import EpochResult
from ampcompare.runs.records.run import EngineInfo, RunRecord, RunSummary
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.recipe import Recipe


@pytest.fixture(scope="session")
def make_comparison() -> Callable[..., Comparison]:
    """Build a comparison of arms with any names, each with the same few seeds."""

    def record(arm: str, number: int, seed: int) -> RunRecord:
        seconds = 0.01 * (1 + number % 7) + 0.001 * (seed % 3)
        epoch = EpochResult(
            epoch=0, samples=100, top1_correct=50 + number % 9, top5_correct=90, loss=1.5,
            train_seconds=1.0 + 0.1 * seed, eval_seconds=0.1,
        )  # fmt: skip
        summary = RunSummary(
            metric_final=epoch.value, metric_best=epoch.value, epochs=[epoch], num_steps=40, skipped_steps=1,
            step_seconds_median=seconds, samples_per_second=64 / seconds, epoch_seconds=1.0 + 0.1 * seed,
            peak_bytes=3 * 2**20, final_loss_scale=65536.0, losses_sha256=f"{number} {seed}",
        )  # fmt: skip
        config = RunConfig(arm="fp32", recipe=Recipe(seed=seed))
        return RunRecord(
            cell=config.digest(), arm=arm, status="completed", config=config,
            engine=EngineInfo(name="compat", version="1.0", reason="no apex here"),
            half="fp16 emulated" if number else None, environment={"torch": "2.4.0", "device": "cpu"}, summary=summary,
        )  # fmt: skip

    def make(arms: Sequence[str], seeds: int = 3, command: str = "ampcompare compare") -> Comparison:
        records = [record(arm, number, seed) for seed in range(seeds) for number, arm in enumerate(arms)]
        return summarize(records, arms=arms, reference=arms[0], command=command)

    return make
