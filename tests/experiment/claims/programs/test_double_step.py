"""The mistake of stepping twice, as the program that shows it."""

from __future__ import annotations

import json

import pytest

from ampcompare.experiment.claims.programs import double_step
from ampcompare.runs.records.run import RunRecord


def test_the_second_step_makes_what_the_scaler_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same weights and batches the run that steps twice ends in NaN at an overflow, the other one skips it."""
    monkeypatch.setattr(double_step, "RECIPE", double_step.RECIPE.model_copy(update={"epochs": 5}))
    lines = [json.loads(line) for line in double_step.records([0]).splitlines()]
    once, twice = (RunRecord.model_validate(line) for line in lines)
    assert (once.arm, once.status, twice.arm, twice.status) == ("step once", "completed", "step twice", "diverged")
    assert twice.summary.diverged_step is not None
    assert twice.summary.diverged_step >= double_step.GROWTH_INTERVAL
    assert twice.summary.metric_final is None
    assert (once.summary.metric_final or 0) > 0.5
    assert once.config.recipe.seed == twice.config.recipe.seed == 0
