"""Records as a run would leave them, with the numbers that a test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ampcompare.config import Recipe, RunConfig
from ampcompare.record import EpochResult, RunRecord, RunSummary

MakeRecord = Callable[..., RunRecord]


@pytest.fixture(scope="session")
def make_record() -> MakeRecord:
    """Build the record of one cell from its arm, seed, accuracy, step time and the like."""

    def make(
        arm: str = "fp32",
        seed: int = 0,
        *,
        top1: float = 0.5,
        seconds: float = 0.01,
        status: str = "completed",
        losses: str = "",
        half: str | None = None,
        device: str = "cpu",
        error: str | None = None,
        **summary: Any,
    ) -> RunRecord:
        config = RunConfig(arm=arm, recipe=Recipe(seed=seed))
        correct = round(top1 * 1000)
        epoch = EpochResult(
            epoch=0,
            samples=1000,
            top1_correct=correct,
            top5_correct=1000,
            loss=1.0,
            train_seconds=1.0,
            eval_seconds=0.1,
        )
        ran = status in ("completed", "diverged")
        numbers: dict[str, Any] = {
            "top1_final": top1 if status == "completed" else None,
            "top1_best": top1,
            "step_seconds_median": seconds,
            "epoch_seconds": 100 * seconds,
            "num_steps": 100,
            "losses_sha256": losses or f"{arm} {seed}",
            "epochs": [epoch],
            "diverged_step": 7 if status == "diverged" else None,
        }
        return RunRecord.model_validate(
            {
                "cell": config.digest(),
                "arm": arm,
                "status": status,
                "config": config,
                "half": half,
                "environment": {"device": device},
                "summary": RunSummary(**{**numbers, **summary}) if ran else RunSummary(),
                "error": error,
            }
        )

    return make
