"""The types that the functions of this interface take and return."""

from __future__ import annotations

from ampcompare.backends.arm import Arm
from ampcompare.experiment.follow import Callback, CellInfo
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.records.step import StepRecord
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.recipe import Recipe

__all__ = ["Arm", "Callback", "CellInfo", "Recipe", "RunConfig", "RunRecord", "StepRecord"]
